"""`export --format hf`: a folder that `from_pretrained` loads without a missing or unexpected key, to the bit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.export import export_parameters, export_pretrained
from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from aggregator.swarm.commands import app as swarm
from edit import durable_files
from edit.config.run import ModelConfig
from edit.errors import ConfigError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec, plan_fragments
from edit.integrations.huggingface import build, configuration
from edit.merging.outer_state import OuterState
from edit.replica.flat import flatten
from tests.aggregator.storage.test_configurations import opened

transformers = pytest.importorskip("transformers")

LLAMA = 'name = "hf:llama"\ncontext = 8\nvocabulary = 32\n[model.options]\nhidden_size = 16\nintermediate_size = 24\n'
HEADS = "num_hidden_layers = 2\nnum_attention_heads = 2\nnum_key_value_heads = 2\n"
GPT2 = 'name = "hf:gpt2"\ncontext = 8\nvocabulary = 32\n[model.options]\nn_embd = 16\nn_layer = 2\nn_head = 2\n'
MIXTRAL = LLAMA.replace("llama", "mixtral") + HEADS + "num_local_experts = 2\n"


def founded(path: Path, model: str) -> tuple[StateFolder, torch.nn.Module]:
    """A run whose outer parameters are those of the model returned: random, unlike what its seed would give."""
    folder = StateFolder.create(path, f'name = "test"\n[model]\n{model}')
    Authority.create(folder.path, folder.run_id, ("localhost",), now=time.time())
    config = configuration(folder.config().model)
    config.dtype = torch.float32
    module = build(config, 77)
    return found(folder, module), module


def found(folder: StateFolder, module: torch.nn.Module) -> StateFolder:
    named = dict(module.named_parameters())
    schema = plan_fragments(named.items())
    theta = [flatten([named[t.name] for t in fragment.tensors]) for fragment in schema.fragments]
    write(folder, schema, theta)
    return folder


def write(folder: StateFolder, schema: Schema, theta: list[torch.Tensor]) -> None:
    store = Store(folder.outer, folder.config(), folder.run_id)
    store.found(OuterState(schema, folder.config(), theta))
    store.close()


@pytest.mark.parametrize(
    "model",
    [LLAMA + HEADS, LLAMA + HEADS + "tie_word_embeddings = true\n", LLAMA + HEADS + 'dtype = "bfloat16"\n', GPT2, MIXTRAL],
    ids=["llama", "tied", "bf16", "gpt2", "mixtral"],
)
def test_from_pretrained_gives_the_outer_parameters_to_the_bit(tmp_path: Path, model: str) -> None:
    folder, module = founded(tmp_path / "run", model)
    out = tmp_path / "exported"
    result = CliRunner().invoke(app, ["export", "--state", str(folder.path), "--format", "hf", "--out", str(out)])
    assert result.exit_code == 0, result.output
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {key: list(report[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")} == {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
    }
    for name, parameter in module.named_parameters():
        other = dict(loaded.named_parameters())[name]
        assert other.dtype is torch.float32
        assert torch.equal(other, parameter), name
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(loaded(input_ids=tokens).logits, module.eval()(input_ids=tokens).logits)
    assert (out / "generation_config.json").exists()
    assert json.loads((out / "run.json").read_text())["run_id"] == folder.run_id
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


GOVERNED = '[audit]\nenabled = true\n[governance]\napprovers = ["ann"]\nneeded = 1\n'


def test_an_export_is_described_by_the_configuration_in_force(tmp_path: Path) -> None:
    toml = f'name = "test"\n[average]\nkind = "ema"\n{GOVERNED}[model]\n{GPT2}'
    folder = StateFolder.create(tmp_path / "run", toml)
    Authority.create(folder.path, folder.run_id, ("localhost",), now=time.time())
    module = build(configuration(folder.config().model), 0)
    opened(folder, schema=plan_fragments(module.named_parameters())).close()
    unapproved = toml.replace('"ema"', '"ema"\ndecay = 0.5') + "layer_norm_epsilon = 0.5\n"
    folder.run_toml.write_text(unapproved)
    exported = export_pretrained([folder], tmp_path / "out", averaged=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_norm_epsilon"] == 1e-5
    assert (folder.config().average.shown, exported.average) == ("ema 0.5", "ema 0.9")
    folder.run_toml.write_text(unapproved.replace(GOVERNED, '[audit]\nenabled = true\n[aggregators]\naddresses = ["b:7700"]\n'))
    assert folder.config().aggregators.count == 2
    assert export_parameters([folder], tmp_path / "out.safetensors").digest == exported.digest


def test_only_hf_models(tmp_path: Path) -> None:
    folder = StateFolder.create(tmp_path / "run", 'name = "test"\n')
    schema = Schema((FragmentSpec(fragment_id=0, name="a", tensors=(TensorSpec(name="a.weight", shape=(3,)),)),))
    write(folder, schema, [torch.zeros(3)])
    with pytest.raises(ConfigError, match=r'only for runs whose model\.name is hf:MODEL_TYPE; this one trains "builtin:gpt"'):
        export_pretrained([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, ["export", "--state", str(folder.path), "--format", "gguf", "--out", "x"])
    assert isinstance(result.exception, ConfigError)


def test_a_run_of_adapters_is_told_what_to_do(tmp_path: Path) -> None:
    folder, _ = founded(tmp_path / "other", GPT2)
    adapters = StateFolder.create(tmp_path / "run", f'name = "test"\n[model]\n{GPT2}')
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    schema = Schema((FragmentSpec(fragment_id=0, name="h.0", tensors=(TensorSpec(name=name, shape=(2, 16)),)),))
    write(adapters, schema, [torch.zeros(32)])
    with pytest.raises(ConfigError, match=r"see base_model.*lora_A.*--format safetensors"):
        export_pretrained([adapters], tmp_path / "out")
    assert folder.path.exists()


def test_a_run_that_froze_weights_is_no_whole_model(tmp_path: Path) -> None:
    folder = StateFolder.create(tmp_path / "run", f'name = "test"\n[model]\n{GPT2}')
    module = build(configuration(folder.config().model), 0)
    module.transformer.wte.weight.requires_grad_(False)
    found(folder, module)
    with pytest.raises(ConfigError, match=r"see transformer\.wte\.weight"):
        export_pretrained([folder], tmp_path / "out")


def test_an_export_removes_no_folder_but_its_own(tmp_path: Path) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    mine = tmp_path / ".out.tmp" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for refused in (False, True):  # the second time there is something in the folder
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
            export_pretrained([folder], tmp_path / "out")
        assert mine.read_text() == "mine"
        assert {path.name for path in tmp_path.iterdir()} == {"run", "out", ".out.tmp"}


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_permissions_of_a_folder_follow_the_umask(tmp_path: Path, umask: int) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    before = os.umask(umask)
    try:
        export_pretrained([folder], tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o666 & ~umask}


def test_a_link_to_an_empty_folder_is_followed_and_another_one_refused_at_once(tmp_path: Path) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    export_pretrained([folder], tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "config.json").exists()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"/loop: exists and is not an empty folder"):
        export_pretrained([folder], tmp_path / "loop")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_pretrained([folder], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("No space left on device")]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)

    def fill(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fill)
    with pytest.raises(ConfigError, match=r"^--out .*exported: cannot be written \(No space left on device\)$"):
        export_pretrained([folder], tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_present_folder_can_be_named_by_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    export_pretrained([folder], Path())
    assert (out / "config.json").exists()
    with pytest.raises(StorageError, match=r"\.: is a folder; name a file"):
        export_parameters([folder], Path())
    (out / "latest").symlink_to(tmp_path / "elsewhere")
    export_parameters([folder], out / "latest")
    assert (out / "latest").is_symlink() and (tmp_path / "elsewhere").stat().st_size, "the file behind a link is replaced"
    with pytest.raises(ConfigError, match="--out /: is the root of all folders"):
        export_pretrained([folder], Path("/"))


def test_without_transformers_the_command_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'edit-localsgd\[hf\]'"):
        configuration(ModelConfig(name="hf:gpt2"))


def test_what_is_written_replaces_nothing_of_the_folder_that_it_is_of(tmp_path: Path) -> None:
    folder, _ = founded(tmp_path / "run", LLAMA + HEADS)
    run = folder.path
    (tmp_path / "link").symlink_to(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    files = [run / "run.json", run / "new", run / "outer" / "new", run, tmp_path / "link" / "ca.key"]
    for program, words in (
        (app, ("export", "--state", run, "--out")),
        (app, ("export", "--state", run, "--format", "hf", "--out")),
        (app, ("report", "--state", run, "--out")),
        (app, ("report", "--state", tmp_path / "other", "--beside", run, "--out")),
        (app, ("audit", "export", "--state", run)),
        (swarm, ("export", run, "--out")),
        (swarm, ("report", run, "--out")),
        (swarm, ("audit", "export", run)),
    ):
        for file in files:
            error = CliRunner().invoke(program, [str(word) for word in (*words, file)]).exception
            assert isinstance(error, ConfigError) and str(error).startswith(f"{file}: lies in {run}, "), (words, file, error)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "run-exported").mkdir()
    export_parameters([folder], tmp_path / "run-exported" / "run.json")


def test_the_same_parameters_are_the_same_file(tmp_path: Path) -> None:
    """So that its hash may be compared."""
    folder, module = founded(tmp_path / "run", LLAMA + HEADS)
    files = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for file in files:
        exported = export_parameters([folder], file)
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], "pt") as read:
        assert read.metadata() == exported.origin()
        assert all(read.get_tensor(name).equal(theta) for name, theta in module.named_parameters())


def test_two_exports_at_once_to_one_file_and_a_file_beside_it_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    out, mine, others = tmp_path / "out", tmp_path / ".out.tmp", list[bytes]()
    mine.write_text("mine")

    def fsync(descriptor: int) -> None:
        if not others:
            others.append(b"")
            export_parameters([folder], out)
            others.append(out.read_bytes())
        os.fsync(descriptor)

    monkeypatch.setattr(durable_files.sync, "__defaults__", (fsync,))
    export_parameters([folder], out)
    assert (others[1:], mine.read_text()) == ([out.read_bytes()], "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", ".out.tmp"}


def test_a_folder_that_lost_its_end_is_not_exported(tmp_path: Path) -> None:
    folder, _ = founded(tmp_path / "run", GPT2)
    out = tmp_path / "out.safetensors"
    for outer_step in (0, 1):
        folder.high_water.write_text(json.dumps({"format": 1, "outer_step": outer_step, "digest": "0" * 64}))
        if outer_step == 0:
            export_parameters([folder], out)
    out.unlink()
    with pytest.raises(ConfigError, match="holds outer step 0, but outer step 1 was committed"):
        export_parameters([folder], out)
    shutil.rmtree(folder.outer)
    with pytest.raises(ConfigError, match="holds no outer step, but outer step 1 was committed"):
        export_parameters([folder], out)
    assert not out.exists()
