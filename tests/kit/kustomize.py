"""What Kustomize makes of a folder, as far as deploy/kubernetes uses it: resources, components, merging patches,
configMapGenerator (files, literals, merge), namespace and images. Anything else in a kustomization is refused.

Names of generated ConfigMaps keep no hash, so that what refers to them can be looked up as it is written.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_WORDS = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator", "namespace", "images"}


def objects(path: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def render(folder: Path) -> list[Object]:
    return _apply(folder, [])


def merged(target: Any, patch: Any) -> Any:
    """A strategic merge: mappings by key (null takes one out), lists of named things by `name`, others whole."""
    if isinstance(target, Mapping) and isinstance(patch, Mapping):
        both = {key: merged(target[key], patch[key]) for key in target.keys() & patch.keys()}
        whole = {**target, **{key: value for key, value in patch.items() if key not in target}, **both}
        return {key: value for key, value in whole.items() if value is not None}
    if _are_named(target) and _are_named(patch):
        patches = {one["name"]: one for one in patch}
        kept = [merged(one, patches.pop(one["name"], {})) for one in target]
        return [*kept, *patches.values()]
    return copy.deepcopy(patch)


def _apply(folder: Path, found: list[Object]) -> list[Object]:
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert wanted.keys() <= _WORDS, f"{folder}: {wanted.keys() - _WORDS} is not understood here"
    for name in wanted.get("resources", ()):
        path = (folder / name).resolve()
        found = [*found, *(render(path) if path.is_dir() else objects(path))]
    for name in wanted.get("components", ()):
        found = _apply((folder / name).resolve(), found)
    for generated in wanted.get("configMapGenerator", ()):
        found = _generate(folder, generated, found)
    for patch in wanted.get("patches", ()):
        for one in objects(folder / patch["path"]):
            found = _patched(found, one)
    found = [_with_images(one, wanted.get("images", ())) for one in found]
    if "namespace" in wanted:
        found = [
            one if one["kind"] == "Namespace" else merged(one, {"metadata": {"namespace": wanted["namespace"]}})
            for one in found
        ]
    names = [_identity(one) for one in found]
    assert len(names) == len(set(names)), f"{folder}: {[name for name in names if names.count(name) > 1]} come twice"
    return found


def _generate(folder: Path, generated: Mapping[str, Any], found: list[Object]) -> list[Object]:
    files = {Path(name).name: (folder / name).read_text() for name in generated.get("files", ())}
    literals = dict(one.split("=", 1) for one in generated.get("literals", ()))
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generated["name"]},
        "data": {**files, **literals},
    }
    return _patched(found, made) if generated.get("behavior") == "merge" else [*found, made]


def _patched(found: Sequence[Object], patch: Object) -> list[Object]:
    assert _identity(patch) in map(_identity, found), f"{_identity(patch)} is not there to be patched"
    return [merged(one, patch) if _identity(one) == _identity(patch) else one for one in found]


def _with_images(one: Any, images: Sequence[Mapping[str, str]]) -> Any:
    """Every `image: name:tag` in it under its new name and tag."""
    if isinstance(one, list):
        return [_with_images(part, images) for part in one]
    if not isinstance(one, Mapping):
        return one
    made = {key: _with_images(value, images) for key, value in one.items()}
    for image in images:
        name, _, tag = str(made.get("image", "")).partition(":")
        if name == image["name"]:
            made["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    return made


def _identity(one: Object) -> tuple[str, str, str]:
    return one["apiVersion"], one["kind"], one["metadata"]["name"]


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "name" in one for one in value)
