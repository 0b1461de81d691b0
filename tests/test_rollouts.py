import math

import pytest
import torch
from tiny import constant_model, letters, random_model
from torch import tensor

from rlworkbench.advantages import group_advantages
from rlworkbench.rollouts import Monitor, Rollouts, Stop, TokenRecorder, TorchSampler, filter_logps, join, mask_after_eos, pad_left, repeat_prompts

PROMPTS = [[1, 5, 6, 7], [1, 8], [1, 5, 5, 9, 10, 11, 12, 4, 3], [1, 18]]


@pytest.fixture(scope="module")
def model(): return random_model()


def same(a, b): return a.shape == b.shape and bool((a == b).all())


def record(B=2, P=3, T=4, **changes):
    parts = dict(prompt_ids=torch.ones(B, P).long(), prompt_mask=torch.ones(B, P), completion_ids=torch.full((B, T), 5), completion_mask=torch.ones(B, T),
                 policy_mask=torch.ones(B, T), logps=torch.full((B, T), -1.), group=torch.arange(B), source=torch.zeros(B), stop=torch.zeros(B))
    return Rollouts(**{**parts, **changes})


# ---------------------------------------------------------------- the record
@pytest.mark.parametrize("changes, words", [
    (dict(prompt_ids=torch.ones(2, 3)), ["prompt_ids", "int64", "float32"]),
    (dict(completion_ids=torch.ones(2).long()), ["completion_ids", "(2,)"]),
    (dict(prompt_mask=torch.ones(2, 4)), ["prompt_mask", "(2, 3)", "(2, 4)"]),
    (dict(completion_mask=torch.ones(2, 3)), ["completion_mask", "(2, 4)", "(2, 3)"]),
    (dict(policy_mask=torch.ones(3, 4)), ["policy_mask", "(2, 4)", "(3, 4)"]),
    (dict(policy_mask=None), ["policy_mask", "NoneType"]),
    (dict(policy_mask=torch.full((2, 4), .5)), ["policy_mask", "0 and 1", "0.5"]),
    (dict(logps=torch.zeros(2, 5)), ["logps", "(2, 4)", "(2, 5)"]),
    (dict(logps=torch.full((2, 4), -math.inf)), ["logps", "finite"]),
    (dict(group=torch.zeros(3)), ["group", "(2,)", "(3,)"]),
    (dict(source=torch.zeros(2, 1)), ["source", "(2,)", "(2, 1)"]),
    (dict(stop=torch.zeros(1)), ["stop", "(2,)", "(1,)"]),
    (dict(rewards=torch.zeros(2, 4)), ["rewards", "(2,)", "(2, 4)"]),
    (dict(prompts=["a"]), ["prompts", "2", "1"]),
    (dict(completions=["a"] * 3), ["completions", "2", "3"]),
    (dict(problems=[]), ["problems", "2", "0"]),
    (dict(extras=dict(values=torch.zeros(3, 4))), ["extras['values']", "2", "3"]),
    (dict(prompt_mask=tensor([[1, 1, 1], [1, 1, 0]])), ["prompt_mask", "left-padded"]),
    (dict(completion_mask=tensor([[1, 1, 0, 1], [1, 1, 1, 1]])), ["completion_mask", "right-padded"]),
    (dict(completion_mask=tensor([[1, 1, 0, 0], [1, 1, 1, 1]])), ["policy_mask", "completion_mask"]),
])
def test_refused_records_name_field_and_shapes(changes, words):
    with pytest.raises(ValueError) as error: record(**changes)
    assert all(w in str(error.value) for w in words), str(error.value)


def test_record_accepts_nan_rewards_bool_masks_and_gaps_in_logps():
    r = record(rewards=tensor([1., math.nan]), policy_mask=tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool(), logps=tensor([[-1., -1, math.nan, 0], [-1, -1, -1, -1]]))
    assert r.policy_mask.dtype == torch.int64 and r.n_tokens == 6


def test_take_cat_and_state_dict_round_trip(tmp_path):
    a = record(extras=dict(values=torch.arange(8.).view(2, 4), hidden=torch.ones(2, 4, 3), note=["x", "y"], score=torch.ones(2, 2)), rewards=tensor([0., 1.]), completions=["p", "q"])
    b = record(B=1, P=5, T=2, extras=dict(values=torch.ones(1, 2), hidden=torch.ones(1, 2, 3), note=["z"], score=torch.ones(1, 2)), rewards=tensor([.5]), completions=["r"])
    both = Rollouts.cat([a, b], pad_id=7)
    assert both.prompt_ids.shape == (3, 5) and both.prompt_mask[0].tolist() == [0, 0, 1, 1, 1] and both.prompt_ids[0, 0] == 7
    assert both.completion_ids[2].tolist() == [5, 5, 7, 7] and both.completion_mask[2].tolist() == [1, 1, 0, 0]
    assert both.extras["hidden"].shape == (3, 4, 3) and both.extras["hidden"][2, 2:].abs().sum() == 0
    assert both.extras["note"] == ["x", "y", "z"] and both.completions == ["p", "q", "r"]
    assert same(both.take([0, 1]).extras["values"], a.extras["values"])
    assert both.take(slice(2, 3)).rewards.tolist() == [.5] and both.take(tensor([True, False, False])).extras["note"] == ["x"]
    torch.save(both.state_dict(), tmp_path / "r.pt")
    back = Rollouts.from_state_dict(torch.load(tmp_path / "r.pt"))
    assert all(same(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(back.fields().values(), both.fields().values()) if not isinstance(x, dict))
    with pytest.raises(ValueError, match="rewards is missing"): Rollouts.cat([a, b.replace(rewards=None)])


# ---------------------------------------------------------------- masks
def test_r1_several_end_tokens():
    mask, finished = mask_after_eos(tensor([[5, 9, 7, 7]]), [2, 9])
    assert mask.tolist() == [[1, 1, 0, 0]] and finished.tolist() == [True]
    # the same from a sampler: both end ids stop a row, and are kept as its last token
    torch.manual_seed(0)
    r = TorchSampler(constant_model([0.] * 10), max_new_tokens=50, eos_ids=[2, 9]).sample([[1]] * 64)
    last = r.completion_ids.gather(1, r.lengths[:, None] - 1)[:, 0]
    assert set(last.tolist()) == {2, 9} and bool((r.stop == Stop.EOS).all())
    assert same(mask_after_eos(r.completion_ids, [2, 9])[0], r.completion_mask)


def test_r2_padding_id_equals_end_id():
    ids = tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2]])
    mask, finished = mask_after_eos(ids, 2)
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]] and finished.tolist() == [True, False, True]
    class PadIsEnd: pad_token_id = eos_token_id = 2; batch_decode = staticmethod(lambda rows, **kw: ["" for _ in rows])
    torch.manual_seed(0)
    r = TorchSampler(constant_model([0.] * 10), PadIsEnd(), max_new_tokens=8).sample([[1, 2, 5], [5]] * 8)
    assert r.prompt_ids[:2].tolist() == [[1, 2, 5], [2, 2, 5]] and r.prompt_mask[:2].tolist() == [[1, 1, 1], [0, 0, 1]]    # id 2 in a prompt is attended
    assert same(r.completion_mask, mask_after_eos(r.completion_ids, 2)[0]) and len(set(r.lengths.tolist())) > 2
    assert same(r.stop == Stop.LENGTH, ~mask_after_eos(r.completion_ids, 2)[1])


def test_a14_tool_tokens_are_attended_and_not_trained(model):
    first = TorchSampler(model, max_new_tokens=5, eos_ids=[]).sample([[1, 5, 6, 7]])
    tool = [10, 11, 12, 13, 14, 15, 16]
    second = TorchSampler(model, max_new_tokens=3, eos_ids=[]).sample([[1, 5, 6, 7]], prefixes=[first.completion_ids[0].tolist() + tool])
    r = join(first, [tool], second)
    assert int(r.policy_mask.sum()) == 8 and int(r.completion_mask.sum()) == 15
    assert r.policy_mask[0].tolist() == [1] * 5 + [0] * 7 + [1] * 3
    assert r.prompt_ids.shape == (1, 4)        # the conversation before, old assistant messages included, is prompt: it has no loss
    def loss(logps): return -(logps * r.policy_mask).sum()
    touched = r.logps.clone(); touched[:, 5:12] += 3.
    assert loss(touched) == loss(r.logps)


# ---------------------------------------------------------------- sampling
def test_r3_padding_side(model):
    tokenizer = letters(); tokenizer.padding_side = "right"
    sampler = TorchSampler(random_model(len(tokenizer)), tokenizer, max_new_tokens=16, greedy=True, eos_ids=[])
    prompts = [[1, 5, 6], [1, 5, 6, 7, 8, 9, 10, 11, 12]]
    together = sampler.sample(prompts)
    alone = [sampler.sample([p]) for p in prompts]
    for i in range(2):
        assert together.completion_ids[i].tolist() == alone[i].completion_ids[0].tolist()
        torch.testing.assert_close(together.logps[i], alone[i].logps[0], atol=1e-4, rtol=0)
    assert tokenizer.padding_side == "right"
    assert together.completion_ids.unique().numel() > 2


def test_sampler_equals_generate(model):
    "The same draws as the library's own loop: greedy, and sampled while no row has left."
    ids, mask = pad_left(PROMPTS)
    common = dict(input_ids=ids, attention_mask=mask, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    theirs = model.generate(**common, do_sample=False)
    assert same(theirs[:, ids.shape[1]:], TorchSampler(model, max_new_tokens=20, greedy=True, eos_ids=[]).sample(PROMPTS).completion_ids)
    for kw in (dict(), dict(temperature=.6), dict(top_k=5), dict(top_p=.8), dict(temperature=1.3, top_k=8, top_p=.7)):
        torch.manual_seed(1)
        theirs = model.generate(**common, do_sample=True, **{**dict(top_k=0, top_p=1.), **kw})
        torch.manual_seed(1)
        ours = TorchSampler(model, max_new_tokens=20, eos_ids=[], **kw).sample(PROMPTS)
        assert same(theirs[:, ids.shape[1]:], ours.completion_ids), kw


@pytest.mark.parametrize("kw", [dict(top_k=3), dict(top_p=.5), dict(temperature=.5, top_k=4)])
def test_filtered_logps_are_those_of_the_distribution_sampled_from(model, kw):
    from rlworkbench.scoring import score_rollouts
    torch.manual_seed(0)
    r = TorchSampler(model, max_new_tokens=10, eos_ids=[2], **kw).sample(PROMPTS * 4)
    logits = score_rollouts(model, r, want=("logits",)).logits
    logps = filter_logps((logits / kw.get("temperature", 1.)).log_softmax(-1).flatten(0, 1), kw.get("top_k"), kw.get("top_p")).view_as(logits)
    wanted = logps.gather(2, r.completion_ids[..., None])[..., 0].masked_fill(r.completion_mask == 0, 0)
    torch.testing.assert_close(r.logps, wanted, atol=1e-4, rtol=0)


def test_r5_continuing_a_prefix():
    tokenizer = letters()
    prefix = "1: 3+4=7\n\n"
    prefix_ids = tokenizer.encode(prefix, add_special_tokens=False)
    torch.manual_seed(0)
    r = TorchSampler(random_model(len(tokenizer)), tokenizer, max_new_tokens=6).sample([tokenizer.encode("3+4=")] * 3, prefixes=[prefix_ids] * 3)
    assert r.prompt_ids[0, -len(prefix_ids):].tolist() == prefix_ids and 2 not in r.prompt_ids
    for i in range(3):
        n = int(r.lengths[i])
        whole = tokenizer.decode(prefix_ids + r.completion_ids[i, :n].tolist(), skip_special_tokens=True)
        assert prefix + r.completions[i] == whole
    assert same(r.policy_mask, r.completion_mask)       # only new tokens are in the completion, and all of them are trained


def test_r5_text_behind_a_prefix_keeps_its_leading_space():
    class DropsSpace:
        pad_token_id = eos_token_id = None
        def batch_decode(self, rows, **kw): return ["".join(" w" for _ in r).lstrip() for r in rows]
    r = TorchSampler(constant_model([0.] * 5), DropsSpace(), max_new_tokens=2, eos_ids=[]).sample([[1]], prefixes=[[3]])
    assert "w" + r.completions[0] == "w w w"


def test_r6_no_second_tokenization():
    "Ids for `he` + `llo` stay two tokens although the tokenizer would write `hello` as one, over a tool turn too."
    pieces = ["hello", "he", "llo", "T", "x"]
    from rlworkbench.policies import build_tokenizer
    tokenizer = build_tokenizer(pieces, "pieces")
    he, llo, tool = (tokenizer.convert_tokens_to_ids(x) for x in ("he", "llo", "T"))
    assert len(tokenizer.encode("hello", add_special_tokens=False)) == 1
    sampler = TorchSampler(constant_model([0.] * len(tokenizer)), tokenizer, max_new_tokens=4, eos_ids=[])
    first = sampler.sample([[1]], forced=[[he, llo]])
    assert first.completion_ids[0, :2].tolist() == [he, llo] and first.completions[0].startswith("hello")
    second = sampler.sample([[1]], prefixes=[first.completion_ids[0].tolist() + [tool]])
    r = join(first, [[tool]], second)
    assert r.completion_ids[0].tolist() == first.completion_ids[0].tolist() + [tool] + second.completion_ids[0].tolist()
    assert r.completion_ids.shape == r.completion_mask.shape == r.policy_mask.shape == r.logps.shape == (1, 9)
    third = join(r, [[tool, tool]], second)
    assert third.completion_ids[0, :9].tolist() == r.completion_ids[0].tolist() and third.logps.shape == (1, 15)


def test_r7_duplicate_prompts(model):
    prompts, group = repeat_prompts([[1, 5, 6], [1, 5, 6], [1, 7]], 2)
    torch.manual_seed(0)
    r = TorchSampler(model, max_new_tokens=6, eos_ids=[]).sample(prompts, group=group)
    assert r.group.tolist() == [0, 0, 1, 1, 2, 2] and len(r) == 6
    assert [row[m.bool()].tolist() for row, m in zip(r.prompt_ids, r.prompt_mask)] == prompts
    rewards = tensor([1., 0, 1, 1, 0, 1])
    # three groups of two: the second has one class and gets 0; merged with the first (same prompt) it would not
    a = group_advantages(rewards, r.group, eps=0.)
    assert a[2:4].tolist() == [0., 0.]
    torch.testing.assert_close(a[:2], tensor([.5 ** .5, -.5 ** .5]))


def test_r8_prompt_too_long():
    model = random_model(context=64)
    prompts = [[1, 5], [1, *[6] * 99], [1, 7], [1, 8]]
    r = TorchSampler(model, max_new_tokens=16, eos_ids=[2]).sample(prompts)
    assert r.extras["shortened"].tolist() == [False, True, False, False] and int(r.extras["shortened"].sum()) == 1
    assert r.prompt_mask.sum(1).tolist() == [2, 48, 2, 2] and r.prompt_ids.shape[1] + 16 <= 64      # rule: the last context - max_new_tokens
    assert bool((r.lengths > 0).all()) and bool(torch.isfinite(r.logps).all())
    with pytest.raises(ValueError, match="max_new_tokens=64 leaves no room"): TorchSampler(model, max_new_tokens=64).sample([[1]])
    with pytest.raises(ValueError, match="at least one token"): TorchSampler(model, max_new_tokens=4).sample([[1], []])


def test_a11_temperature_on_the_sampling_side():
    "Logits 3, 1, 0 at temperature 0.6: token 0 has log-probability -0.0415; without the temperature it would be -0.1698."
    torch.manual_seed(0)
    r = TorchSampler(constant_model([3., 1., 0.]), max_new_tokens=4, temperature=.6, eos_ids=[]).sample([[1]] * 50)
    torch.testing.assert_close(r.logps[r.completion_ids == 0].unique(), tensor([-.0415]), atol=1e-4, rtol=0)


def test_m4_seeds_in_a_group(model):
    sampler = TorchSampler(model, max_new_tokens=12, eos_ids=[2])
    def run(n):
        torch.manual_seed(5)
        return sampler.sample([[1, 5, 6]] * n)
    a, b = run(8), run(8)
    assert same(a.completion_ids, b.completion_ids) and same(a.logps, b.logps)
    assert len({tuple(x) for x in a.completion_ids.tolist()}) >= 2
    # another batch size draws other numbers: as the chapter on rollouts says
    assert not same(run(16).completion_ids[:8, :3], a.completion_ids[:, :3])


def test_a_resumed_run_repeats_an_unbroken_one(model):
    sampler = TorchSampler(model, max_new_tokens=12, eos_ids=[2])
    torch.manual_seed(0)
    sampler.sample(PROMPTS)
    state = torch.get_rng_state()
    unbroken = sampler.sample(PROMPTS)
    torch.manual_seed(99); torch.set_rng_state(state)
    assert same(sampler.sample(PROMPTS).completion_ids, unbroken.completion_ids)


# ---------------------------------------------------------------- rows that leave, monitors, forced tokens
def test_leaving_rows_keep_their_columns(model):
    "Whatever share of the batch has to end before rows leave, greedy rollouts are the same; and so are they one by one."
    prompts = [[1, a, b] for a in range(3, 11) for b in (4, 9)]
    ends = [2, 7, 11]
    sampler = TorchSampler(model, max_new_tokens=30, greedy=True, eos_ids=ends, value_fn=lambda h: h.sum(-1), keep=("hidden",))
    runs = [sampler.replace(compact=c).sample(prompts) for c in (0., .125, .5, 2.)]
    assert len(set(runs[0].lengths.tolist())) > 3
    for r in runs[1:]:
        assert same(r.completion_ids, runs[0].completion_ids) and same(r.stop, runs[0].stop)
        torch.testing.assert_close(r.extras["hidden"], runs[0].extras["hidden"], atol=1e-4, rtol=0)
        torch.testing.assert_close(r.extras["values"], runs[0].extras["hidden"].sum(-1), atol=1e-3, rtol=0)
    for i, p in enumerate(prompts):
        one = sampler.sample([p])
        assert one.completion_ids[0].tolist() == runs[0].completion_ids[i, :one.completion_ids.shape[1]].tolist()


class Watcher(Monitor):
    "Keeps what it is shown, and stops where it is told to."
    def __init__(self, stop=lambda rows, t, tokens: torch.zeros_like(rows, dtype=torch.bool)): self.stop = stop
    def start(self, B, device): self.B, self.seen = B, TokenRecorder()
    def update(self, rows, t, logits, tokens, values):
        best = logits.log_softmax(-1)
        self.seen.add(rows, regret=best.max(-1).values - best.gather(1, tokens[:, None])[:, 0], shown=tokens, at=torch.full_like(rows, t),
                      value_seen=torch.zeros(len(rows)) if values is None else values)
        return self.stop(rows, t, tokens)
    def finish(self): return self.seen.tensors(self.B)


def test_a_monitor_that_never_stops_changes_no_token(model):
    sampler = TorchSampler(model, max_new_tokens=30, eos_ids=[2, 7])
    torch.manual_seed(4); without = sampler.sample(PROMPTS * 8)
    torch.manual_seed(4); watched = sampler.replace(value_fn=lambda h: h.sum(-1)).with_monitor(Watcher()).with_monitor(Monitor()).sample(PROMPTS * 8)
    for name in ("completion_ids", "completion_mask", "logps", "stop"): assert same(getattr(without, name), getattr(watched, name)), name
    assert len(set(without.lengths.tolist())) > 5


def test_monitor_sees_untempered_logits_tokens_and_values_of_live_rows(model):
    from rlworkbench.scoring import score_rollouts
    torch.manual_seed(4)
    r = TorchSampler(model, max_new_tokens=30, temperature=.5, eos_ids=[2, 7], value_fn=lambda h: h[:, 0]).with_monitor(Watcher()).sample(PROMPTS * 8)
    logps = score_rollouts(model, r, want=("logits",)).logits.log_softmax(-1)
    regret = (logps.max(-1).values - logps.gather(2, r.completion_ids[..., None])[..., 0]) * r.completion_mask
    torch.testing.assert_close(r.extras["regret"], regret, atol=1e-4, rtol=0)
    assert same(r.extras["shown"], r.completion_ids * r.completion_mask)
    assert same(r.extras["value_seen"], r.extras["values"] * r.completion_mask)
    assert same(r.extras["at"], torch.arange(r.completion_ids.shape[1]) * r.completion_mask)


def test_a_cut_keeps_its_token_and_end_tokens_are_not_cut():
    model = constant_model([0.] * 6)
    sampler = TorchSampler(model, max_new_tokens=40, eos_ids=[2])
    torch.manual_seed(0); free = sampler.sample([[1]] * 64)
    stop = Watcher(lambda rows, t, tokens: (tokens == 5) | (tokens == 2))
    torch.manual_seed(0); cut = sampler.with_monitor(stop).sample([[1]] * 64)
    assert {int(s) for s in cut.stop.unique()} == {Stop.EOS, Stop.CUT}
    for ids, n, s in zip(cut.completion_ids.tolist(), cut.lengths.tolist(), cut.stop.tolist()):
        assert ids[n - 1] == {Stop.EOS: 2, Stop.CUT: 5}[s] and 5 not in ids[:n - 1] and 2 not in ids[:n - 1]
    assert same(cut.completion_ids[:, 0], free.completion_ids[:, 0])      # the first token is drawn before any row can leave
    class Tool(Watcher): code = Stop.TOOL
    torch.manual_seed(0)
    assert Stop.TOOL in sampler.with_monitor(Tool(lambda rows, t, tokens: tokens == 5)).sample([[1]] * 8).stop.tolist()
    everything = sampler.with_monitor(Watcher(lambda rows, t, tokens: torch.ones_like(rows).bool())).sample([[1]] * 8)
    assert everything.lengths.tolist() == [1] * 8


def test_forced_tokens_by_row(model):
    from rlworkbench.scoring import score_rollouts
    forced = [[9, 10, 11], [], [12], [2]]
    torch.manual_seed(0)
    sampler = TorchSampler(model, max_new_tokens=8, temperature=.7, top_k=2, eos_ids=[2])
    r = sampler.sample(PROMPTS, forced=forced)
    for i, f in enumerate(forced):
        assert r.completion_ids[i, :len(f)].tolist() == f and r.policy_mask[i, :len(f)].tolist() == [0] * len(f)
        assert r.policy_mask[i, len(f):].tolist() == r.completion_mask[i, len(f):].tolist()
    assert r.lengths[3] == 1 and r.stop[3] == Stop.EOS                    # a forced end token ends the row
    given = (r.completion_mask - r.policy_mask).bool()
    torch.testing.assert_close(r.logps[given], score_rollouts(model, r, temperature=.7).logps[given], atol=1e-4, rtol=0)   # finite although top_k would exclude them
    assert same(sampler.replace(train_forced=True).sample(PROMPTS, forced=forced).policy_mask[:, 0], torch.ones(4).long())
    with pytest.raises(ValueError, match="max_new_tokens=8"): sampler.sample(PROMPTS, forced=[[5] * 9, [], [], []])
    with pytest.raises(ValueError, match="forced must have one entry for each of 4"): sampler.sample(PROMPTS, forced=[[5]])


@pytest.mark.parametrize("changes, setting", [(dict(temperature=0.), "temperature"), (dict(top_k=0), "top_k"), (dict(top_p=1.5), "top_p"),
                                              (dict(max_new_tokens=0), "max_new_tokens"), (dict(keep=("logits",)), "keep")])
def test_refused_settings(changes, setting):
    with pytest.raises(ValueError, match=setting): TorchSampler(None, **changes)


def test_end_ids_come_from_generation_config_and_tokenizer(model):
    from copy import deepcopy
    other = deepcopy(model); other.generation_config.eos_token_id = [7, 9]
    class Tokenizer: eos_token_id, pad_token_id = 3, 0
    assert TorchSampler(other, Tokenizer())._ends() == [3, 7, 9] and TorchSampler(other)._ends() == [7, 9] and TorchSampler(other, eos_ids=[])._ends() == []


def test_dropout_is_off_while_sampling_and_back_afterwards():
    model = random_model()
    model.config.attention_dropout = .5
    for layer in model.model.layers: layer.self_attn.attention_dropout = .5
    sampler = TorchSampler(model, max_new_tokens=8, greedy=True, eos_ids=[])
    wanted = sampler.sample(PROMPTS).logps
    model.train()
    assert same(sampler.sample(PROMPTS).logps, wanted) and model.training


def families():
    import transformers as tf
    small = dict(vocab_size=19, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                 pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128, initializer_range=.2)
    return {"llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**small)),
            "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**small, sliding_window=6, final_logit_softcapping=2., query_pre_attn_scalar=32)),
            "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**{k: v for k, v in small.items() if k != "head_dim"}, logits_scaling=3.)),
            "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**{k: v for k, v in small.items() if k != "head_dim"}, logit_scale=.3))}


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_other_families_equal_generate(family):
    "Grouped heads, sliding windows shorter than the text, capped and scaled logits."
    torch.manual_seed(0)
    model = families()[family]().eval()
    ids, mask = pad_left(PROMPTS)
    torch.manual_seed(1)
    theirs = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1., max_new_tokens=20, eos_token_id=None, pad_token_id=0,
                            output_logits=True, return_dict_in_generate=True)
    torch.manual_seed(1)
    r = TorchSampler(model, max_new_tokens=20, eos_ids=[]).sample(PROMPTS)
    assert same(r.completion_ids, theirs.sequences[:, ids.shape[1]:])
    logps = torch.stack(theirs.logits, 1).float().log_softmax(-1).gather(2, r.completion_ids[..., None])[..., 0]
    torch.testing.assert_close(r.logps, logps, atol=1e-4, rtol=0)


def test_peft_model_samples_as_its_merged_self():
    from peft import LoraConfig, PromptTuningConfig, get_peft_model
    model = get_peft_model(random_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    r = TorchSampler(model, max_new_tokens=10, greedy=True, eos_ids=[], keep=("hidden",)).sample(PROMPTS)
    merged = TorchSampler(model.merge_and_unload(), max_new_tokens=10, greedy=True, eos_ids=[]).sample(PROMPTS)
    assert same(r.completion_ids, merged.completion_ids)
    torch.testing.assert_close(r.logps, merged.logps, atol=1e-4, rtol=0)
    prompted = get_peft_model(random_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="LoRA"): TorchSampler(prompted, max_new_tokens=4).sample([[1]])
