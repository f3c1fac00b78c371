"""What a terminal is shown: words that others chose, and no orders."""

import typer


def visible(text: str) -> str:
    """It without what a terminal takes for orders, or shows nothing of: their numbers stand there.

    Reasons, names and header values are other people's, callers' among them.
    """
    return "".join(one if one.isprintable() or one in "\n\t" else f"\\u{ord(one):04x}" for one in text)


def say(text: str, *, err: bool = False) -> None:
    """A line of words, whoever's they are."""
    typer.echo(visible(text), err=err)
