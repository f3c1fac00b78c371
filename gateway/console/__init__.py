"""The console: pages for operators at `/console`, each of which is a client of the admin API as the session's actor.

`mount.py` puts it on the control plane's application, whose door lets in who is logged in; `shell.py` says what its
answers say to browsers, `client.py` asks the API (in process, with the log-in's cookie, so that roles, checks and the
audit log are the API's own), `view.py` is one open page with its frame and its only refresh loop, `dialogs.py`,
`tables.py` and `charts.py` are what pages are made of, `words.py` says figures in words, and `pages/` has one file for
each page.
"""
