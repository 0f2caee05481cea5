"""Tree decoding against transformers' own greedy `generate`, token for token, in float32."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medusa.decoding import Engine
from medusa.errors import MedusaError
from medusa.generation import Request, generate
from medusa.sampling import SamplingParams
from medusa.step import draft
from medusa.tree import Tree
from tests.medusa.models import FAMILIES, HIDDEN, VOCABULARY, small_heads, small_model
from tests.medusa.test_tree import trees

BUSHY = Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)])
LENGTHS = (5, 11, 3, 70, 8, 1)


def prompts(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in LENGTHS]


def greedy(model, ids: list[int], new: int = 40) -> list[int]:
    """The reference: transformers' generate."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=new, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def answers(engine: Engine, inputs: list[list[int]], new: int = 40, **values) -> list[list[int]]:
    requests = [Request(ids=ids, max_new_tokens=new, key=i, **values) for i, ids in enumerate(inputs)]
    done = {item.key: item.token_ids for item in generate(engine, requests, eos_ids={2})}
    return [done[i] for i in range(len(inputs))]


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_kind_equals_plain_greedy(family, kind):
    model, heads = small_model(family), small_heads(kind, draft_vocab_size=40)
    expected = [greedy(model, ids) for ids in prompts()]
    for batch, tree in [(1, None), (1, BUSHY), (4, BUSHY), (4, Tree.chain(3))]:
        engine = Engine(model, heads, tree, batch=batch, max_length=128)
        assert answers(engine, prompts()) == expected


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_are_really_used(kind):
    """Untrained heads repeat the base's prediction, so on a base that repeats itself they must win tokens."""
    model, heads = small_model(), small_heads(kind, scale=0.0)
    engine = Engine(model, heads, Tree.chain(3), max_length=256)
    done = next(generate(engine, [Request(ids=[5] * 8, max_new_tokens=60)], eos_ids=set()))
    assert done.token_ids == greedy_without_eos(model, [5] * 8, 60)
    assert max(done.accepted) > 1
    assert len(done.token_ids) == 1 + sum(done.accepted)


def greedy_without_eos(model, ids, new):
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=VOCABULARY + 1,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_one_word_forty_eight_times(batch):
    model, heads = small_model(), small_heads("hydra", scale=0.0)
    engine = Engine(model, heads, BUSHY, batch=batch, max_length=256)
    assert answers(engine, [[9] * 48] * 3) == [greedy(model, [9] * 48)] * 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tree=trees(depth=3),
    kind=st.sampled_from(["medusa", "hydra"]),
    batch=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_random_trees_equal_plain_greedy(tree, kind, batch, seed):
    model, heads = small_model(), small_heads(kind, seed=seed)
    inputs = prompts(seed)[:4]
    engine = Engine(model, heads, tree, batch=batch, max_length=128)
    assert answers(engine, inputs, new=12) == [greedy(model, ids, 12) for ids in inputs]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tree=trees(depth=3),
    kind=st.sampled_from(["medusa", "hydra"]),
    batch=st.integers(1, 4),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.2]),
        top_p=st.sampled_from([0.8, 1.0]),
        top_k=st.sampled_from([0, 5]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
        logit_bias=st.sampled_from([{}, {7: 2.0, 9: -float("inf")}]),
        seed=st.integers(0, 99),
    ),
)
def test_whatever_the_rules_a_tree_says_what_plain_decoding_says(tree, kind, batch, params):
    """Sampled tokens too: a seed's draws belong to places in the answer and not to steps."""
    model, heads = small_model(), small_heads(kind, seed=1)
    inputs = prompts(2)[:4]
    plain = answers(Engine(model, max_length=128), inputs, new=12, sampling=params)
    assert (
        answers(Engine(model, heads, tree, batch=batch, max_length=128), inputs, 12, sampling=params) == plain
    )


def test_greedy_with_a_repetition_penalty_equals_transformers():
    model, heads = small_model(), small_heads("hydra", scale=0.0)
    rules = SamplingParams(repetition_penalty=1.3)
    for ids in prompts():
        expected = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=1.3,
        )[0, len(ids) :].tolist()
        assert answers(Engine(model, heads, BUSHY, max_length=128), [ids], 30, sampling=rules) == [expected]


def test_own_lm_heads_decode_the_same_text():
    model = small_model()
    expected = [greedy(model, ids) for ids in prompts()]
    for kind in ("medusa", "hydra"):
        heads = small_heads(kind, lm_head="own", draft_vocab_size=30)
        assert answers(Engine(model, heads, BUSHY, batch=2, max_length=128), prompts()) == expected


def test_hidden_states_are_those_before_each_token():
    """What decoding hands out for training must be what one forward over prompt and answer gives."""
    model, heads = small_model(), small_heads("hydra", scale=0.0)
    for tree in (None, BUSHY):
        engine = Engine(model, heads, tree, batch=2, max_length=128)
        requests = [Request(ids=ids, max_new_tokens=20, key=ids, want_hidden=True) for ids in prompts()]
        for done in generate(engine, requests, eos_ids={2}):
            whole = torch.tensor([done.key + done.token_ids])
            with torch.inference_mode():
                states = model.model(whole).last_hidden_state[0]
            first = len(done.key) - 1
            torch.testing.assert_close(
                done.hidden, states[first : first + len(done.token_ids)], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_draft_equals_asking_each_head_along_each_path(kind):
    model, heads = small_model(), small_heads(kind, draft_vocab_size=40)
    heads.draft_vocab.copy_(torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:40])
    hidden, root = torch.randn(2, HIDDEN), torch.tensor([3, 9])
    embed, weight = model.get_input_embeddings(), model.get_output_embeddings().weight
    with torch.inference_mode():
        tokens = draft(heads, heads.projections(weight), embed, BUSHY.buffers(), hidden, root)
        for row in range(2):
            for node, path in enumerate(BUSHY.paths, start=1):
                so_far = [int(root[row])]
                for k, rank in enumerate(path, start=1):
                    features = heads.features(k, hidden[row], embed(torch.tensor(so_far)))
                    ranking = (weight[heads.draft_vocab] @ features).argsort(descending=True)
                    so_far.append(int(heads.draft_vocab[ranking[rank]]))
                assert tokens[row, node] == so_far[-1]


def test_a_row_can_go_on_from_its_prefix():
    model = small_model()
    engine = Engine(model, small_heads(), BUSHY, max_length=128)
    engine.prefill(0, [5, 6, 7, 8])
    engine.step()
    engine.rewind(0, 3)
    continued = engine.prefill(0, [9, 10], start=3)
    assert continued == greedy(model, [5, 6, 7, 9, 10], 1)[0]


def test_sampling_with_a_tree_draws_from_the_base():
    """Lossless sampling: the token that follows a prompt has the base's distribution, with and without a tree."""
    model, heads = small_model(), small_heads(scale=0.0)
    with torch.inference_mode():
        first = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    expected = torch.softmax(first / 1.5, -1)
    engine = Engine(model, heads, Tree.chain(2), batch=8, max_length=64)
    requests = [
        Request(ids=[5, 6, 7], max_new_tokens=2, sampling=SamplingParams(1.5, seed=s), key=s)
        for s in range(600)
    ]
    drawn = [done.token_ids[0] for done in generate(engine, requests, eos_ids=set())]
    share = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY) / len(drawn)
    assert (
        share - expected
    ).abs().sum() / 2 < 0.15  # total variation; 600 draws of 64 tokens leave about 0.1


def test_a_seed_fixes_the_answer_whatever_else_is_in_flight():
    model = small_model()
    rules = SamplingParams(1.0, seed=7)
    alone = answers(Engine(model, batch=1, max_length=128), prompts(), sampling=rules)
    together = answers(Engine(model, batch=4, max_length=128), prompts(), sampling=rules)
    assert alone == together


@pytest.mark.parametrize(
    ("ids", "says"), [([], "prompt is empty"), ([5] * 200, "200 tokens and the context holds 128")]
)
def test_prompts_that_do_not_fit(ids, says):
    engine = Engine(small_model(), max_length=128)
    with pytest.raises(MedusaError, match=says):
        engine.prefill(0, ids)


def test_heads_of_another_size_are_refused():
    with pytest.raises(MedusaError, match="hidden size of 32"):
        Engine(small_model(), small_heads(hidden_size=32), Tree.chain(1))


def test_a_tree_without_heads_is_refused():
    with pytest.raises(MedusaError, match="needs heads"):
        Engine(small_model(), tree=Tree.chain(1))


def test_the_answer_never_runs_over_the_context():
    model, heads = small_model(), small_heads(scale=0.0)
    engine = Engine(model, heads, BUSHY, max_length=40)
    done = next(generate(engine, [Request(ids=[5] * 30, max_new_tokens=500)], eos_ids=set()))
    assert len(done.token_ids) == 10
    assert done.finish == "length"
    assert done.token_ids == greedy_without_eos(model, [5] * 30, 10)


def test_an_interrupted_prefill_leaves_no_row_that_claims_what_it_does_not_hold(monkeypatch):
    """Ctrl-C in the middle of a prompt: the next one starts after what is really there."""
    model = small_model()
    engine = Engine(model, max_length=128)
    engine.prefill(0, prompts()[1])
    layer = model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    follow_up = [*prompts()[1][:4], *prompts()[3][:20]]
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(0, follow_up[4:], start=4)
    monkeypatch.setattr(layer, "forward", forward)
    assert engine.kept_prefix(0, follow_up) == 4
    assert engine.prefill(0, follow_up[4:], start=4) == greedy(model, follow_up, 1)[0]
