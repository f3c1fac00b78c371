"""The console, in a real Chromium over the real stack."""
