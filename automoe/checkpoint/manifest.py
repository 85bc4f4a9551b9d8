"""Manifest of a checkpoint: files with sizes and digests, counters, and the run that wrote it."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from automoe import __version__
from automoe.checkpoint.steps import MANIFEST, digest_of
from automoe.comm.agreement import Ranks
from automoe.config.convert import config_to_dict
from automoe.config.frozen import GOES_ON, TENSORS, flat
from automoe.config.schema import Config
from automoe.errors import CheckpointError
from automoe.storage.files import checksum, read_file, write_durably
from automoe.storage.foreign import parse_json

Facts = Mapping[str, Any]  # a JSON object
FORMAT = 3
# Keys of this version. A newer version may use another key to say that its files are read in
# another way.
_KEYS = "format step counters config generators val_loss versions files sha256 base".split()
# Errors of a file that does not exist. Any other error means that it cannot be read now, which is
# no damage.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)

# Sections whose values change the numbers of a run without making it another model.
_NUMBERS = ("train", "optim", "moe", "lora", "recipe_args")


def write_manifest(step_dir: Path, content: Facts, files: Facts) -> None:
    """Write and flush ``step_dir/manifest.json``, with a digest of its own content.

    Args:
        content: entries of the manifest, such as the step and the model's settings.
        files: ``bytes`` (size) and ``xxh128`` (XXH3 digest) of each file of the step, by name.
    """
    versions = {"automoe": __version__, "torch": str(torch.__version__)}
    manifest = {"format": FORMAT, "versions": versions, **content}
    manifest["files"] = dict(sorted(files.items()))
    manifest["sha256"] = digest_of(manifest)
    write_durably(step_dir / MANIFEST, json.dumps(manifest, indent=1))


def read_manifest(step_dir: Path) -> tuple[dict[str, Any], str | None]:
    """Return a checkpoint's manifest, and a description of the manifest's damage or None.

    A damaged manifest is returned as {}.

    Raises:
        OSError: the manifest cannot be read, or the step is a broken link.
        CheckpointError: another version of automoe wrote it in a format unknown to this version.
    """
    if step_dir.is_symlink() and not step_dir.exists():
        raise OSError(
            errno.EHOSTDOWN, f"it is a link to {step_dir.readlink()}, which does not exist"
        )
    try:
        manifest = parse_json(read_file(step_dir / MANIFEST))
        form = manifest["format"]
        versions = manifest.get("versions")
        wrote = str(versions)
        if isinstance(versions, dict):  # another format may have another kind
            wrote = ", ".join(f"{name} {number}" for name, number in versions.items())
        if form != FORMAT and isinstance(form, int):
            raise _other_version(
                step_dir, f"format {form}, and this version reads format {FORMAT}", wrote
            )
        if manifest["sha256"] != digest_of(manifest):
            return {}, f"{MANIFEST} has changed since it was written"
        if unknown := sorted(manifest.keys() - _KEYS):
            raise _other_version(
                step_dir, f"{', '.join(unknown)} in {MANIFEST}, unknown to this version", wrote
            )
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return {}, f"{MANIFEST}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{MANIFEST}: {type(error).__name__}: {error}"
    return manifest, None


def _other_version(step_dir: Path, content: str, wrote: str) -> CheckpointError:
    return CheckpointError(
        f"{step_dir} was written by another version ({wrote}) than this one (automoe {__version__}, torch "
        f"{torch.__version__}): it has {content}. It is left as it is. Go on with the version that wrote it, name "
        "another run_dir, or move it out of the folder to go on from the step before"
    )


def file_damage(path: Path, facts: Facts, content: bool = True) -> str | None:
    """Return a description of the damage to one file of a checkpoint, or None.

    Args:
        facts: the file's ``bytes`` and XXH3 digest ``xxh128`` in the manifest.
        content: False compares the file's size alone.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{path.name} has {size} bytes, and {facts['bytes']} were written"
        if content and checksum(path) != facts["xxh128"]:
            return f"{path.name} has a different digest from when it was written"
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return f"{path.name}: {error.strerror}"
    return None


def verify_step(
    step_dir: Path, ranks: Ranks, content: bool = True
) -> tuple[dict[str, Any], str | None]:
    """Return a checkpoint's manifest ({} if damaged), and a description of the checkpoint's damage or None.

    Every listed file must exist, complete and unchanged. Collective: ranks divide the files.

    Args:
        content: False compares sizes alone.

    Raises:
        CheckpointError: another version wrote the step, or the step cannot be read, so that it is
            unknown whether it is damaged.
    """
    try:
        manifest, problem = ranks.lead(lambda: read_manifest(step_dir))
        if problem is not None:
            return manifest, problem
        files = manifest["files"]
        mine = ranks.share({name: facts["bytes"] for name, facts in files.items()})
        problems = ranks.all(
            lambda: [file_damage(step_dir / name, files[name], content) for name in mine]
        )
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(
            f"{step_dir} cannot be read: {error.strerror}{file}. It is left as it is. Check the disk or its "
            "permissions, or move it out of the folder to go on from the step before"
        ) from None
    return manifest, min(filter(None, chain.from_iterable(problems)), default=None)


def damage(step_dir: Path, content: bool = True) -> str | None:
    """Return a description of a checkpoint's damage, or None; this process alone reads all files.

    Raises ``CheckpointError`` if reading fails.

    Args:
        content: False compares sizes alone.
    """
    return verify_step(step_dir, Ranks(alone=True), content)[1]


def check_model(step_dir: Path, saved: Facts, config: Config) -> None:
    """Raise if a checkpoint's model or optimizer differs from those of ``config``.

    A field that the manifest lacks was added later; the saved model has the field's default.

    Args:
        step_dir: folder of the checkpoint, for the message.
        saved: the configuration in the manifest.

    Raises:
        CheckpointError: fields differ; the message lists them with both values.
    """
    then = _with_defaults(saved)
    now = flat(config_to_dict(config))
    # The source of the weights does not shape the model.
    keys = [
        key for key in sorted(then | now) if key.startswith("model.") and key != "model.hf_path"
    ]
    changed = [
        f"{key} was {then.get(key)}, is {now.get(key)}"
        for key in (*keys, *TENSORS)
        if then.get(key) != now.get(key)
    ]
    if then.get("model.family") != now["model.family"]:  # all else follows from it
        changed = [part for part in changed if part.startswith("model.family ")]
    if changed:
        raise CheckpointError(
            f"{step_dir} is of another model or optimizer: {'; '.join(changed)}. Set them back, or "
            "begin in a new run_dir with checkpoint.resume=auto, or here with checkpoint.resume=never"
        )


def check_base(step_dir: Path, manifest: Facts, config: Config, base: str | None) -> None:
    """Raise ``CheckpointError`` if a checkpoint was trained with other fixed weights than this run's.

    Fixed weights are frozen weights, which checkpoints omit, and those of a reference model.

    Args:
        step_dir: folder of the step, for the message.
        manifest: the step's manifest, which holds the digest of its fixed weights.
        base: ``checkpoint_identity`` (a digest) of this run's fixed weights; None if it has none.
    """
    if "base" in manifest and config.model.random_weights:
        raise CheckpointError(
            f"{step_dir} is of a version before 0.27, which left the frozen random weights out. Start again in a new run_dir"
        )
    saved = manifest.get("base", base)
    if saved != base:
        raise CheckpointError(
            f"{step_dir} was trained on the fixed weights of {manifest['config']['model']['hf_path']}, "
            f"and the weights of model.hf_path={config.model.hf_path} differ: another checkpoint, or a file of it "
            "that changed since. Name the one that it was trained with, unchanged"
        )


def changed_settings(saved: Facts, config: Config) -> tuple[list[str], list[str]]:
    """Return the settings that affect a run's numbers and differ from those of a checkpoint.

    Args:
        saved: the configuration in the checkpoint's manifest.

    Returns:
        (saved values, values of ``config``), each a list of ``key=value``.
    """
    now = flat(config_to_dict(config))
    then = _with_defaults(saved)
    # Compiled code rounds differently, and the decay changes the averaged weights.
    quiet = set(GOES_ON) - {"train.compile", "optim.ema_decay"}
    keys = [
        key
        for key in now
        if key.split(".")[0] in _NUMBERS and key not in quiet and then.get(key) != now[key]
    ]
    return [f"{key}={then.get(key)}" for key in keys], [f"{key}={now[key]}" for key in keys]


def _with_defaults(saved: Facts) -> dict[str, Any]:
    """Return a manifest's configuration by dotted key, with defaults for keys added since then."""
    return flat(config_to_dict(Config())) | flat(saved)
