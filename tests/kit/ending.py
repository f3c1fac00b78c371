"""How a command of the tests is stopped from outside."""

import signal


def sigterm_as_ctrl_c() -> None:
    """Let SIGTERM raise `KeyboardInterrupt`: what was started is ended and temporary folders go, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
