"""`gateway check REPOSITORY` looks at what is in the repository, and nowhere else."""

import json
from pathlib import Path

from typer.testing import CliRunner

from gateway.__main__ import app

X_TO_Y = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
PLANTED = "planted-beside-the-repository"


def write(folder: Path, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("raise SystemExit('no model is run')")
    (folder / "config.pbtxt").write_text(config + X_TO_Y)


def calling(name: str, called: str) -> str:
    maps = 'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    step = f'model_name: "{called}" model_version: -1 {maps}'
    return f'name: "{name}" platform: "ensemble" ensemble_scheduling {{ step [ {{ {step} }} ] }}'


def test_what_points_out_of_a_repository_is_a_fault_that_tells_nothing_of_there(tmp_path):
    """SC-05: another's name, steps elsewhere, and a link, which is the operator's own and is followed."""
    repository = tmp_path / "models"
    write(tmp_path / "beside", f'name: "beside" backend: "python" parameters {{ key: "{PLANTED}" }}')
    write(repository / "c_other", 'name: "../beside" backend: "python"')
    write(repository / "c_step", calling("c_step", "../beside"))
    write(repository / "c_none", calling("c_none", "../absent"))
    write(repository / "c_etc", calling("c_etc", "../../etc"))
    write(repository / "c_link", 'name: "c_link" backend: "python"')
    (repository / "c_link" / "2").symlink_to(tmp_path / "beside" / "1")
    before = sorted(tmp_path.rglob("*"))
    plain = CliRunner().invoke(app, ["check", str(repository)])
    told = CliRunner().invoke(app, ["check", str(repository), "--json"])
    assert (plain.exit_code, told.exit_code) == (1, 1)
    found = {one["model"]: (one["severity"], one["reason"]) for one in json.loads(told.stdout)["findings"]}
    missing = "the ensemble calls '{}', which is not in the repository"
    assert found == {
        "c_other": (
            "fault",
            "unexpected directory name 'c_other' for model '../beside', directory name must equal model name",
        ),
        "c_step": ("fault", missing.format("../beside")),  # which is there
        "c_none": ("fault", missing.format("../absent")),  # which is not
        "c_etc": ("fault", missing.format("../../etc")),
    }
    assert json.loads(told.stdout)["models"]["c_link"] is True
    assert PLANTED not in plain.output + told.output
    assert sorted(tmp_path.rglob("*")) == before
