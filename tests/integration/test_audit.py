"""What this suite runs with is what requirements/ pins, file by file."""

from release import audit


def test_both_environments_are_as_they_were_pinned_and_installed(capsys):
    assert audit.main() == 0, capsys.readouterr().out
