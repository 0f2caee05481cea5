"""Heads in vLLM's format: names, shapes, biases, the token map; and that vLLM reads all of it and drafts the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medusa.base import Base, load_base
from medusa.checkpoint import load_checkpoint, save_checkpoint
from medusa.data.template import encode_prompt
from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.export.vllm import export_vllm
from medusa.generation import Request, generate
from medusa.heads import HeadsConfig, build_heads
from medusa.tree import Tree
from tests.eval.small import make_base

PRUNED = [3, 200, 41, 7, *range(50, 150)]  # not sorted, and no multiple of 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """vLLM's attention on CPUs takes heads of 32 and more."""
    return make_base(tmp_path_factory.mktemp("base") / "base", hidden=128)


def save_heads(
    folder: Path,
    base: Base,
    kind: str = "medusa",
    pruned: Sequence[int] | None = PRUNED,
    **changes: object,
) -> Path:
    """Random heads as a checkpoint."""
    torch.manual_seed(1)
    values = {"num_heads": 3, "num_layers": 2, "draft_vocab_size": len(pruned) if pruned else None} | changes
    config = HeadsConfig(kind=kind, hidden_size=base.hidden_size, vocab_size=base.vocab_size, **values)
    heads = build_heads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.1)
    if pruned:
        heads.draft_vocab = torch.tensor(pruned)
    save_checkpoint(folder, heads, Tree.chain(3), base=base, provenance={"command": ["train_heads.py"]})
    return folder


def drafts_as_vllm_reads(folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    """What vLLM's MedusaModel makes of the files, written out: [n, H] -> [K, n] tokens."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    read = {"token_map"}
    guesses = []
    for k in range(config["num_heads"]):
        x = hidden
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{layer}"
            x = x + torch.nn.functional.silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
            read |= {f"{name}.weight", f"{name}.bias"}
        lm_head = "lm_head.weight" if config["original_lm_head"] else f"lm_heads.{k}.weight"
        read.add(lm_head)
        assert tensors[lm_head].shape == (config["truncated_vocab_size"], config["hidden_size"])
        best = (x @ tensors[lm_head].T).argmax(dim=-1)
        guesses.append(tensors["token_map"][best] if "token_map" in tensors else best)
    assert set(tensors) <= read  # what is not read would be dropped without a word
    return torch.stack(guesses)


def expected_drafts(checkpoint: Path, base: Base, hidden: torch.Tensor) -> torch.Tensor:
    """The kit's own heads' best tokens, [K, n]."""
    heads = load_checkpoint(checkpoint, base).heads
    weight = base.model.get_output_embeddings().weight
    logits = [heads.draft_logits(k, heads.features(k, hidden), weight) for k in (1, 2, 3)]
    return torch.stack([heads.to_tokens(one.argmax(dim=-1)) for one in logits])


@pytest.mark.parametrize(
    ("pruned", "lm_head", "layers"), [(PRUNED, "shared", 1), (None, "shared", 2), (None, "own", 1)]
)
def test_the_files_draft_what_the_heads_draft(tmp_path, base, pruned, lm_head, layers):
    checkpoint = save_heads(tmp_path / "heads", base, pruned=pruned, lm_head=lm_head, num_layers=layers)
    out = export_vllm(checkpoint, tmp_path / "out", base)
    hidden = torch.randn(40, base.hidden_size)
    assert drafts_as_vllm_reads(out, hidden).equal(expected_drafts(checkpoint, base, hidden))


def test_the_config_says_what_vllm_asks_for(tmp_path, base):
    out = export_vllm(save_heads(tmp_path / "heads", base), tmp_path / "out", base)
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "dtype": "float32",
        "hidden_size": 128,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "vocab_size": base.vocab_size,
        "truncated_vocab_size": len(PRUNED),
        "original_lm_head": True,
    }
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    assert tensors["token_map"].tolist() == PRUNED
    assert tensors["lm_head.weight"].equal(base.model.get_output_embeddings().weight[PRUNED])
    assert json.loads((out / "provenance.json").read_text())["command"] == ["train_heads.py"]


def test_a_draft_vocabulary_of_all_tokens_is_none_to_vllm(tmp_path, base):
    everything = torch.randperm(base.vocab_size).tolist()
    checkpoint = save_heads(tmp_path / "heads", base, pruned=everything)
    out = export_vllm(checkpoint, tmp_path / "out", base)
    assert "token_map" not in safetensors.torch.load_file(out / "model.safetensors")
    hidden = torch.randn(40, base.hidden_size)
    assert drafts_as_vllm_reads(out, hidden).equal(expected_drafts(checkpoint, base, hidden))


def test_without_pruning_there_is_no_token_map(tmp_path, base):
    out = export_vllm(save_heads(tmp_path / "heads", base, pruned=None), tmp_path / "out", base)
    assert "token_map" not in safetensors.torch.load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config["truncated_vocab_size"] == config["vocab_size"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "hydra"}, "vLLM runs medusa heads only"),
        ({"lm_head": "own"}, "no place for own LM heads over a pruned vocabulary"),
    ],
)
def test_what_vllm_cannot_run_is_refused(tmp_path, base, changes, message):
    checkpoint = save_heads(tmp_path / "heads", base, **changes)
    with pytest.raises(MedusaError, match=message):
        export_vllm(checkpoint, tmp_path / "out", base)
    assert not (tmp_path / "out").exists()


IN_VLLM = """
import json, sys
import vllm

base, heads, out = sys.argv[1:]
prompts = [{"prompt_token_ids": ids} for ids in ([0, 40, 41, 52, 60, 33], [0, 71, 90])]
sampling = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answers(speculation):
    engine = vllm.LLM(model=base, dtype="float32", max_model_len=128, enforce_eager=True,
                      speculative_config=speculation, model_loader_extra_config={"enable_weights_track": False})
    tokens = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False)]
    return engine, tokens


def look(worker, out):
    import torch

    model = worker.model_runner.drafter.model
    torch.manual_seed(2)
    hidden = torch.randn(40, 128)
    logits = model.compute_logits(model(hidden))
    found = {name: value.clone() for name, value in model.named_parameters()}
    drafts = torch.stack([one.argmax(-1) for one in logits])
    torch.save({"found": found, "hidden": hidden, "drafts": drafts}, out)


if __name__ == "__main__":
    engine, fast = answers({"method": "medusa", "model": heads, "num_speculative_tokens": 3})
    engine.collective_rpc(look, args=(f"{out}/model.pt",))
    del engine
    with open(f"{out}/answers.json", "w") as file:
        json.dump({"fast": fast, "plain": answers(None)[1]}, file)
"""


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_reads_every_tensor_and_answers_as_it_does_without_them(tmp_path, base):
    checkpoint = save_heads(tmp_path / "heads", base)
    out = export_vllm(checkpoint, tmp_path / "out", base)
    script = tmp_path / "script.py"
    script.write_text(IN_VLLM)
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    words = [sys.executable, "-P", str(script), str(base.path), str(out), str(tmp_path)]
    subprocess.run(words, env={**os.environ, **settings}, check=True)
    seen = torch.load(tmp_path / "model.pt")
    answers = json.loads((tmp_path / "answers.json").read_text())
    written = safetensors.torch.load_file(out / "model.safetensors")
    # the token map is one of the model's parameters; a padded LM head has rows of zeros after ours
    assert set(seen["found"]) == set(written)
    for name, tensor in written.items():
        assert seen["found"][name][: len(tensor)].equal(tensor), name
    assert seen["drafts"].equal(expected_drafts(checkpoint, base, seen["hidden"]))
    assert answers["fast"] == answers["plain"]


COUNT_IN_VLLM = """
import json, sys
import vllm

base, heads, file = sys.argv[1:]
with open(file) as opened:
    prompts = [{"prompt_token_ids": ids} for ids in json.load(opened)]

if __name__ == "__main__":
    engine = vllm.LLM(model=base, dtype="float32", max_model_len=256, max_num_seqs=1, enforce_eager=True,
                      speculative_config={"method": "medusa", "model": heads, "num_speculative_tokens": 4},
                      model_loader_extra_config={"enable_weights_track": False}, disable_log_stats=False)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    tokens = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False)]
    counts = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    counts = {name: value for name, value in counts.items() if name.startswith("vllm:spec_decode")}
    with open(file, "w") as opened:
        json.dump({"tokens": tokens, "counts": counts}, opened)
"""

QUESTIONS = (
    "Which tent is best for two people and a dog?",
    "Are merino socks worth the price for hiking?",
    "How do I wash a down jacket?",
    "What is the difference between an OLED and an LED television?",
    "Suggest a gift for a friend who likes baking.",
    "Can I return headphones after opening the box?",
)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_accepts_as_much_of_the_shipped_heads_chain_as_our_engine(tmp_path, smollm2, request):
    base = load_base(str(smollm2), dtype=torch.float32)
    shipped = request.config.rootpath / "checkpoints/smollm2-135m-shopping-medusa"
    prompts = [encode_prompt(base.tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    out = export_vllm(shipped, tmp_path / "out", base)
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "script.py").write_text(COUNT_IN_VLLM)
    words = [sys.executable, "-P", str(tmp_path / "script.py"), str(base.path), str(out)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    subprocess.run([*words, str(tmp_path / "prompts.json")], env=environment, check=True)
    found = json.loads((tmp_path / "prompts.json").read_text())
    theirs = 1 + (
        found["counts"]["vllm:spec_decode_num_accepted_tokens"]
        / found["counts"]["vllm:spec_decode_num_drafts"]
    )
    engine = Engine(base.model, load_checkpoint(shipped, base).heads, Tree.chain(4), max_length=256)
    requests = [Request(ids, 48, key=number) for number, ids in enumerate(prompts)]
    done = sorted(generate(engine, requests, eos_ids=set()), key=lambda answer: answer.key)
    assert [answer.token_ids for answer in done] == found["tokens"]
    steps = sum(len(answer.accepted) for answer in done)
    ours = sum(sum(answer.accepted) for answer in done) / steps
    assert 1.2 < ours
    assert theirs == pytest.approx(ours, rel=0.1)
