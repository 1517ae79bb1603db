"""Models of transformers by name: what options mean, what is refused, and the operator's own model folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edit.config.run import ModelConfig, RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import plan_fragments
from edit.integrations import huggingface as hf
from peers.models.registry import build

transformers = pytest.importorskip("transformers")

NOBODY: frozenset[str] = frozenset()
LLAMA: dict[str, str | int | float | bool] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GPT2: dict[str, str | int | float | bool] = {"n_embd": 16, "n_layer": 2, "n_head": 2}


def config(name: str = "hf:llama", **options: str | int | float | bool) -> ModelConfig:
    return ModelConfig(name=name, context=8, vocabulary=32, options={**(LLAMA if name == "hf:llama" else GPT2), **options})


def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 32, (3, 9), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def folder_of(path: Path, model: nn.Module) -> Path:
    model.save_pretrained(path)  # type: ignore[operator]
    return path


def test_the_loss_is_the_mean_over_the_targets_as_transformers_computes_it() -> None:
    model = build(config(), 0, NOBODY)
    tokens, targets = batch()
    plain = transformers.AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    full = torch.cat([tokens, targets[:, -1:]], dim=1)
    logits = plain(input_ids=full).logits[:, :-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


def test_parameters_keep_the_names_of_transformers_and_blocks_are_fragments() -> None:
    model = build(config(), 0, NOBODY)
    plain = transformers.AutoModelForCausalLM.from_config(model.config)
    assert plan_fragments(model.named_parameters()) == plan_fragments(plain.named_parameters())
    names = [fragment.name for fragment in plan_fragments(model.named_parameters()).fragments]
    assert names == ["model", "model.layers.0", "model.layers.1", "lm_head"]


def test_initial_values_follow_from_the_seed_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    a, b, c = (build(config(), seed, NOBODY).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_context_and_vocabulary_are_the_runs() -> None:
    llama, gpt2 = build(config(), 0, NOBODY), build(config("hf:gpt2"), 0, NOBODY)
    assert (llama.config.max_position_embeddings, llama.config.vocab_size) == (8, 32)
    assert gpt2.transformer.wpe.weight.shape == (8, 16)
    assert gpt2.transformer.wte.weight.shape == (32, 16)
    assert gpt2.config.bos_token_id is None  # GPT-2's own, 50256, is no token of this vocabulary
    assert build(config("hf:gpt2", n_positions=64), 0, NOBODY).transformer.wpe.weight.shape == (64, 16)


def test_tied_weights_are_one_tensor_of_the_schema() -> None:
    schema = plan_fragments(build(config(tie_word_embeddings=True), 0, NOBODY).named_parameters())
    names = [tensor.name for fragment in schema.fragments for tensor in fragment.tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_mixture_of_experts_is_trained_with_its_balance_loss() -> None:
    options: dict[str, str | int | float | bool] = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}
    given = ModelConfig(name="hf:mixtral", context=8, vocabulary=32, options=options)
    balanced = ModelConfig(
        name="hf:mixtral",
        context=8,
        vocabulary=32,
        options={**options, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    )
    plain, more = build(given, 0, NOBODY)(*batch()), build(balanced, 0, NOBODY)(*batch())
    assert more > plain + 0.1


def test_dtype_autocast_compile_and_copies() -> None:
    model = build(config(), 0, NOBODY)
    assert next(build(config(dtype="bfloat16"), 0, NOBODY).parameters()).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch())
    assert loss.dtype is torch.float32
    assert torch.equal(torch.compile(model, backend="eager")(*batch()), model(*batch()))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(*batch()), model(*batch()))


def test_a_table_is_written_as_json() -> None:
    model = build(config(rope_parameters='{"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}'), 0, NOBODY)
    assert model.config.rope_parameters["factor"] == 2.0
    assert build(config(rope_theta=77.0), 0, NOBODY).config.rope_parameters["rope_theta"] == 77.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:lama", {}, "did you mean hf:llama"),
        ("hf:vit", {}, "no causal language model"),
        ("hf:gemma3", {}, "several models"),
        ("hf:llama", {"hidden": 16}, r"model\.options\.hidden: no field of hf:llama"),
        ("hf:llama", {"hidden_size": "big"}, "'hidden_size' expected int, got str"),
        ("hf:llama", {"hidden_size": 18, "num_attention_heads": 4}, "not a multiple"),
        ("hf:llama", {"num_attention_heads": 0}, "not a configuration of hf:llama"),
        ("hf:llama", {"hidden_act": "wavy"}, "cannot be built"),
        ("hf:llama", {"vocab_size": 5}, r"set model\.vocabulary"),
        ("hf:llama", {"use_cache": True}, "no effect"),
        ("hf:llama", {"dtype": "float16"}, r"model\.options\.dtype"),
        ("hf:llama", {"rope_parameters": '{"rope'}, "not JSON"),
        ("hf:llama", {"rope_parameters": '{"auto_map": "x"}'}, "auto_map is not allowed"),
        ("hf:llama", {"_attn_implementation": "someone/kernels"}, "no field"),
        ("hf:llama", {"attn_implementation": "someone/kernels"}, "no field"),
        ("hf:llama", {"auto_map": "x"}, "no field"),
        ("hf:gpt2", {"n_positions": 4}, r"at least model\.context"),
        ("hf:gpt2", {"hidden_size": 16}, "given twice"),
        ("hf:gpt2", {"n_head": 3}, "cannot be built"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(name: str, options: dict[str, str | int | float | bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build(config(name, **options) if options else ModelConfig(name=name), 0, NOBODY)
    assert "\n" not in str(error.value)


def test_what_cannot_compute_is_told_before_the_run() -> None:
    options = {**LLAMA, "num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
    with pytest.raises(ConfigError, match=r"^model\.options: hf:qwen3_moe cannot compute with these: .*out of range$"):
        build(ModelConfig(name="hf:qwen3_moe", context=8, vocabulary=32, options=options), 0, NOBODY)


def test_positions_that_count_from_the_padding_tokens_number_have_room_for_the_context() -> None:
    sizes: dict[str, str | int | float | bool] = {**LLAMA, "hidden_size": 16}
    del sizes["num_key_value_heads"]
    model = build(ModelConfig(name="hf:roberta", context=8, vocabulary=32, options=sizes), 0, NOBODY)
    assert model.config.max_position_embeddings == 8 + 1 + 1
    tokens = torch.arange(2, 10)[None]
    assert model(tokens, tokens).isfinite()
    with pytest.raises(ConfigError, match=r"must be at least model\.context \+ 2, the position of the first token"):
        build(ModelConfig(name="hf:roberta", context=8, options={**sizes, "max_position_embeddings": 9}), 0, NOBODY)


@pytest.mark.parametrize("name", ["bert", "electra", "roformer"])
def test_a_model_that_would_see_later_tokens_is_made_a_decoder(name: str) -> None:
    sizes: dict[str, str | int | float | bool] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = build(ModelConfig(name=f"hf:{name}", context=8, vocabulary=32, options=sizes), 0, NOBODY).eval()
    assert model.training is False and model.config.is_decoder is True
    tokens, _ = batch()
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 7) % 32
    early = [type(model).forward(model, input_ids=each, use_cache=False).logits[:, :5] for each in (tokens, other)]
    assert torch.equal(*early)
    with pytest.raises(ConfigError, match=rf"model\.options\.is_decoder: must be true: else hf:{name} sees the tokens"):
        build(ModelConfig(name=f"hf:{name}", options={"is_decoder": False}), 0, NOBODY)


def test_looking_at_a_model_changes_nothing_in_it() -> None:
    """RWKV halves the weights of every sixth layer for evaluation."""
    sizes: dict[str, str | int | float | bool] = {"hidden_size": 16, "num_hidden_layers": 7, "rescale_every": 2}
    model = build(ModelConfig(name="hf:rwkv", context=8, vocabulary=32, options=sizes), 0, NOBODY)
    plain = hf.build(model.config, 0)
    tokens, _ = batch()
    for each in (model, plain):
        type(each).forward(each, input_ids=tokens)
    assert model.training and plain.training
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_model_that_sees_later_tokens_whatever_it_is_told_is_refused() -> None:
    options: dict[str, str | int | float | bool] = {"d_model": 16, "d_inner": 24, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match=r"model\.name = 'hf:xlnet': its predictions depend on later tokens"):
        build(ModelConfig(name="hf:xlnet", context=8, vocabulary=32, options=options), 0, NOBODY)


def test_run_toml_takes_hf_models_and_refuses_sizes_of_the_builtin() -> None:
    parsed = RunConfig.from_mapping({"model": {"name": "hf:llama", "options": dict(LLAMA)}})
    assert parsed.model.options == LLAMA
    assert RunConfig.from_json(parsed.to_json()).model == parsed.model
    with pytest.raises(ConfigError, match=r"model\.layers has no effect"):
        RunConfig.from_mapping({"model": {"name": "hf:llama", "layers": 3}})
    with pytest.raises(ConfigError, match=r"must be builtin:gpt, hf:MODEL_TYPE or entry:NAME"):
        RunConfig.from_mapping({"model": {"name": "hf:../llama"}})


def test_a_folder_with_weights_founds_the_run_with_them(tmp_path: Path) -> None:
    theirs = build(config(), 9, NOBODY)
    folder = folder_of(tmp_path / "model", theirs)
    ours = build(config(), 0, NOBODY, folder=folder)
    assert ours.training
    for name, parameter in theirs.named_parameters():
        assert torch.equal(dict(ours.named_parameters())[name], parameter), name
    assert torch.equal(ours(*batch()), theirs(*batch()))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "model.safetensors.index.json", "tf_model.h5", "q.gguf"])
def test_weights_that_are_not_read_are_not_passed_over(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "model", build(config(), 9, NOBODY))
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match=rf"{name} is not read; convert the weights to \.safetensors"):
        build(config(), 0, NOBODY, folder=folder)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = build(config(), 9, NOBODY)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 2] = torch.nan
    folder = folder_of(tmp_path / "model", model)
    with pytest.raises(ConfigError, match=r"model: model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        build(config(), 0, NOBODY, folder=folder)


def test_a_folder_without_weights_only_confirms_the_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "peers")
    folder = folder_of(tmp_path / "model", build(config(), 9, NOBODY))
    (folder / "model.safetensors").unlink()
    ours, plain = build(config(), 3, NOBODY, folder=folder).state_dict(), build(config(), 3, NOBODY).state_dict()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert f"no weights in {folder}: they follow from the run's seed" in caplog.text


def test_a_folder_that_contradicts_the_run_is_named_with_the_first_difference(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", build(config(), 9, NOBODY))
    with pytest.raises(ConfigError, match=r"num_hidden_layers is 2 there and 3 in the run.*model\.options\.num_hidden_layers"):
        build(config(num_hidden_layers=3), 0, NOBODY, folder=folder)
    with pytest.raises(ConfigError, match=r"rope_parameters is .*10000.* there and .*500"):
        build(config(rope_theta=500.0), 0, NOBODY, folder=folder)
    with pytest.raises(ConfigError, match=r"vocab_size is 32 there and 64 in the run.*model\.vocabulary"):
        build(ModelConfig(name="hf:llama", context=8, vocabulary=64, options=LLAMA), 0, NOBODY, folder=folder)
    with pytest.raises(ConfigError, match="holds a model of type llama, the run trains hf:gpt2"):
        build(config("hf:gpt2"), 0, NOBODY, folder=folder)
    with pytest.raises(ConfigError, match="--model-folder has no effect"):
        build(ModelConfig(), 0, NOBODY, folder=folder)


def test_a_folder_never_brings_code(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", build(config(), 9, NOBODY))
    written = json.loads((folder / "config.json").read_text())
    written["auto_map"] = {"AutoConfig": "evil.Configuration", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "evil.py").write_text("raise SystemExit('code of a model folder was run')")
    assert type(build(config(), 0, NOBODY, folder=folder)).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}'), "is not valid"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1234"), "cannot be loaded"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter"),
    ],
)
def test_a_damaged_folder_is_told_in_one_line(tmp_path: Path, damage: object, message: str) -> None:
    folder = folder_of(tmp_path / "model", build(config(), 9, NOBODY))
    damage(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as error:
        build(config(), 0, NOBODY, folder=folder)
    assert "\n" not in str(error.value)


def test_weights_of_another_shape_or_with_a_hole_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    folder = folder_of(tmp_path / "model", build(config(), 9, NOBODY))
    tensors = load_file(folder / "model.safetensors")
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        build(config(), 0, NOBODY, folder=folder)
    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": removed[:3]}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is \[3, 16\] there and \[24, 16\] in the run"):
        capfd.readouterr()
        build(config(), 0, NOBODY, folder=folder)
    assert capfd.readouterr() == ("", "")


def test_the_command_line_takes_a_folder(tmp_path: Path) -> None:
    """`alone` writes what it trained; after a step with a tiny rate that is still what the folder holds, nearly."""
    from safetensors.torch import load_file
    from typer.testing import CliRunner

    from peers.cli import app

    theirs = build(ModelConfig(name="hf:llama", context=8, vocabulary=256, options=LLAMA), 9, NOBODY)
    folder = folder_of(tmp_path / "model", theirs)
    options = "\n".join(f"{key} = {value}" for key, value in LLAMA.items())
    (tmp_path / "run.toml").write_text(
        f'[model]\nname = "hf:llama"\ncontext = 8\n[model.options]\n{options}\n[inner]\nlr = 1e-9\nwarmup_steps = 0\n'
    )
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 20)
    given = ["--run", "run.toml", "--data", "text.txt", "--model-folder", str(folder), "--out", "out"]
    paths = [str(tmp_path / word) if word in ("run.toml", "text.txt", "out") else word for word in given]
    result = CliRunner().invoke(app, ["alone", *paths, "--steps", "1", "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    trained = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=0, atol=1e-7)
