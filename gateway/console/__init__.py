"""The console: pages for operators at `/console`, each of which is a client of the admin API as the session's actor.

`mount.py` puts it on the control plane's application, `door.py` lets in who is logged in, `client.py` asks the API
(in process, with the session's cookie, so that roles, checks and the audit log are the API's own), `view.py` is one
open page with its frame and its only refresh loop, `dialogs.py`, `tables.py` and `charts.py` are what pages are made
of, `words.py` says figures in words, and `pages/` has one file for each page.
"""
