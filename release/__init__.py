"""What a release is made of besides images: `make release` writes it into `dist/` (docs/releasing.md).

It is no part of the wheel: `packages` finds what the gateway runs with, `licences` judges it, `notes` reads the
CHANGELOG, `__main__` does the steps.
"""
