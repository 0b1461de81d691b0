"Rollouts in several turns: what the world wrote is real and not trained, ids stay as they were sampled, budgets hold."
import pytest, torch
from rlworkbench.method import Method
from rlworkbench.policies import Policy, build_tokenizer, sft_batch, tiny_model, token_ids
from rlworkbench.rollouts import Stop, TorchSampler
from rlworkbench.toolbox.turns import Marker, TurnSampler, turn_index, with_turns
from rlworkbench.trainer import Trainer, training_config
from rlworkbench.worlds.base import Problem, World
from tiny import random_model

PIECES = ["<c>", "</c>", "<o>", "</o>", "<t>", "</t>", "he", "llo", "hello", "1", "2"]


class Echo(World):
    "Answers each call with the number of tags so far."
    name, vocab, call_end, observation_start, think_tags, max_turns = "echo", PIECES, "</c>", "<o>", ("<t>", "</t>"), 4
    answer_text = "<o>hello</o>"
    def problem(self, rng): return Problem(rng.choice("12") + rng.choice("12") + rng.choice("12"), "1", {})
    def verify(self, problem, completion): return float(len(completion) % 2)
    def respond(self, prompt, completion):
        self.seen = getattr(self, "seen", []) + [(prompt, completion)]
        return self.answer_text


@pytest.fixture(scope="module")
def policy():
    tokenizer = build_tokenizer(PIECES, "echo", 128)
    model = random_model(len(tokenizer), width=32, layers=1, context=128)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2: p /= 3                      # softer opinions: all tags occur
    return Policy(model, tokenizer, "echo")


def turns(policy, world=None, length=40, **kw): return TurnSampler(TorchSampler(policy.model, policy.tokenizer, length), world or Echo(), **kw)
def draw(sampler, policy, n=64, seed=0, **kw):
    torch.manual_seed(seed)
    return sampler.sample([policy.encode("121")]*n, **kw)
def rows(r): return [x[:n] for x, n in zip(r.completion_ids.tolist(), r.lengths.tolist())]


def test_a14_five_seven_three(policy):
    "A14: 5 model tokens, 7 tool tokens, 3 model tokens: 8 enter the loss, 15 are attended."
    tok, world = policy.tokenizer, Echo()
    world.answer_text = "<o>hellohellohellohellohello</o>"
    script = [token_ids(tok, "<c>12he</c>"), token_ids(tok, "11") + [tok.eos_token_id]]
    asked = []
    class Scripted(TorchSampler):
        def sample(self, prompt_ids, **kw):
            asked.append([list(p) for p in prompt_ids])
            return super().sample(prompt_ids, **{**kw, "forced": [script[len(asked) - 1]]})
    r = TurnSampler(Scripted(policy.model, tok, 40, train_forced=True), world).sample([policy.encode("121")])
    assert (r.policy_mask.sum().item(), r.completion_mask.sum().item()) == (8, 15) and r.n_new == 8
    assert r.policy_mask[0].tolist() == [1]*5 + [0]*7 + [1]*3 and r.stop.tolist() == [Stop.EOS]
    assert r.extras["turn"][0].tolist() == [0]*12 + [1]*3 and r.extras["n_turns"].tolist() == [2]
    assert asked[1] == [policy.encode("121") + r.completion_ids[0, :12].tolist()]
    assert world.seen == [("121", "<c>12he</c>")]
    logps = r.logps.clone(); logps[0, 5:12] = -77.           # whatever the tool's tokens are given
    assert torch.equal(r.replace(logps=logps).logps*r.policy_mask, r.logps*r.policy_mask)


def test_a14_an_old_assistant_message_has_no_loss(policy):
    chat = [dict(role="user", content="1"), dict(role="assistant", content="he"), dict(role="user", content="2")]
    ids, mask, labels = sft_batch(policy.tokenizer, [(chat, [("llo", True), ("<o>1</o>", False), ("2", True)])])
    n, known = len(policy.encode(chat)), policy.tokenizer.get_vocab()
    assert known["he"] in ids[0, :n].tolist() and (labels[0, :n] == -100).all()
    assert labels[0, n:].tolist() == [known["llo"], -100, -100, -100, known["2"], policy.tokenizer.eos_token_id] and mask.all()
    r = TurnSampler(TorchSampler(policy.model, policy.tokenizer, 20), Echo()).sample([policy.encode(chat)]*4)
    assert r.policy_mask.shape == r.completion_ids.shape and known["he"] in r.prompt_ids[0].tolist()


def test_r6_sampled_ids_stay_as_they_are(policy):
    "R6: `he` + `llo` stays two tokens, though the tokenizer would write one; ids, masks and log-probabilities have one length."
    tok = policy.tokenizer
    he, llo, hello = (tok.get_vocab()[x] for x in ("he", "llo", "hello"))
    assert token_ids(tok, "hello") == [hello]
    script = [[he, llo, *token_ids(tok, "<c></c>")], [he, llo, tok.eos_token_id]]
    calls = []
    class Scripted(TorchSampler):
        def sample(self, prompt_ids, **kw):
            calls.append(prompt_ids)
            return super().sample(prompt_ids, **{**kw, "forced": [script[len(calls) - 1]]})
    r = TurnSampler(Scripted(policy.model, tok, 40, train_forced=True), Echo()).sample([policy.encode("1")])
    assert r.completion_ids[0].tolist() == script[0] + token_ids(tok, "<o>hello</o>") + script[1]
    assert r.completion_ids.shape == r.completion_mask.shape == r.policy_mask.shape == r.logps.shape == r.extras["turn"].shape
    assert calls[1] == [policy.encode("1") + script[0] + token_ids(tok, "<o>hello</o>")]


def test_r5_prefixes_end_the_prompt(policy):
    "R5: the prompt ids end with the prefix's own ids, and prefix + new text is the whole text."
    prefix = token_ids(policy.tokenizer, "<t>12</t>")
    r = draw(turns(policy), policy, 16, prefixes=[prefix]*16)
    assert all(row[-len(prefix):] == prefix for row in r.prompt_ids.tolist())
    whole = [policy.tokenizer.decode(prefix + ids, skip_special_tokens=True) for ids in rows(r)]
    assert ["<t>12</t>" + text for text in r.completions] == whole and r.extras["n_turns"].max() > 1


def test_log_probabilities_are_those_of_the_whole_text(policy):
    r = draw(turns(policy), policy)
    assert r.extras["n_turns"].max() > 2
    seen = torch.cat([r.prompt_mask, r.completion_mask], 1)
    with torch.no_grad(): logits = policy.model(torch.cat([r.prompt_ids, r.completion_ids], 1), attention_mask=seen).logits
    P = r.prompt_ids.shape[1]
    logps = logits[:, P-1:-1].log_softmax(-1).gather(-1, r.completion_ids[..., None])[..., 0]
    mine = r.policy_mask.bool()
    torch.testing.assert_close(logps[mine], r.logps[mine], atol=1e-4, rtol=0)


def test_the_world_writes_after_every_call_and_only_it(policy):
    world = Echo()
    r = draw(turns(policy, world), policy, 256)
    opening, closing, call = (policy.tokenizer.get_vocab()[x] for x in ("<o>", "</o>", "</c>"))
    for i, ids in enumerate(rows(r)):
        mine = r.policy_mask[i, :len(ids)].tolist()
        answered = [k for k, x in enumerate(ids) if x == call and mine[k] and k + 3 < len(ids)]
        assert all(ids[k+1:k+4] == token_ids(policy.tokenizer, "<o>hello</o>") and mine[k+1:k+4] == [0, 0, 0] for k in answered)
        own = [k for k, x in enumerate(ids) if x == opening and mine[k]]
        assert own in ([], [len(ids) - 1])                       # one that writes an observation itself is cut off there
        assert (r.stop[i] == Stop.CUT) == bool(own)
        assert len(ids) <= 40 and (r.stop[i] != Stop.EOS or ids[-1] == policy.tokenizer.eos_token_id)
    assert {Stop.CUT, Stop.EOS} <= set(r.stop.tolist()) and r.extras["n_turns"].max() == 4
    assert all(prompt == "121" and text.endswith("</c>") for prompt, text in world.seen)


def test_turn_numbers_grow_by_one_behind_each_answer(policy):
    r = draw(turns(policy), policy, 128)
    closing = policy.tokenizer.get_vocab()["</o>"]
    for i, ids in enumerate(rows(r)):
        turn, mine = r.extras["turn"][i, :len(ids)].tolist(), r.policy_mask[i, :len(ids)].tolist()
        steps = [b - a for a, b in zip(turn, turn[1:])]
        assert steps == [int(x == closing and not m) for x, m in zip(ids[:-1], mine[:-1])]
        assert r.extras["n_turns"][i] == (turn[-1] if turn else 0) + 1
    assert turn_index(torch.tensor([[1, 1, 1, 0]]), [[0, 1, 2]]).tolist() == [[0, 1, 2, 0]]


def test_limits_hold_for_turns_and_rollouts(policy):
    r = draw(turns(policy, length=12), policy, 128)
    assert r.lengths.max() <= 12 and (r.stop == Stop.LENGTH).any()
    r = draw(turns(policy, max_turns=1), policy, 128)
    assert (r.extras["n_turns"] == 1).all() and (r.policy_mask == r.completion_mask).all() and (r.stop == Stop.TOOL).any()
    r = draw(turns(policy, turn_tokens=3), policy, 128)
    for i in range(128):
        per_turn = torch.bincount(r.extras["turn"][i][r.policy_mask[i].bool()], minlength=1)
        assert per_turn.max() <= 3


@pytest.mark.parametrize("budget", (0, 1, 2))
def test_a_thought_ends_with_its_budget(policy, budget):
    tok = policy.tokenizer
    r = draw(turns(policy, think_budget=budget), policy, 128)
    opening, closing, call = (tok.get_vocab()[x] for x in ("<t>", "</t>", "</c>"))
    forced = 0
    for i, ids in enumerate(rows(r)):
        mine, used = r.policy_mask[i, :len(ids)].tolist(), None
        for x, m in zip(ids, mine):
            if x == opening: used = 0
            elif x == call: used = None                          # the turn is over, thought or not
            elif x == closing:
                if not m: assert used == budget; forced += 1     # put in by the world's rule, at the budget, and not trained
                used = None
            elif used is not None and m: used += 1
            assert used is None or used <= budget
    assert forced > 10
    assert (r.logps[(r.policy_mask == 0)] == 0).all()


def test_other_rows_do_not_matter(policy):
    "Greedy rollouts are the same alone and among others, though rows leave at different turns."
    sampler = TurnSampler(TorchSampler(policy.model, policy.tokenizer, 40, greedy=True), Echo())
    prompts = [policy.encode(x) for x in ("1", "12", "22", "212", "<t>1", "<c>", "he")]
    together = rows(sampler.sample(prompts))
    assert together == [rows(sampler.sample([p]))[0] for p in prompts]


def test_extras_of_both_turns_are_joined(policy):
    head = lambda hidden: hidden.sum(1)
    r = draw(TurnSampler(TorchSampler(policy.model, policy.tokenizer, 40, value_fn=head, keep=("hidden",)), Echo()), policy)
    assert r.extras["values"].shape == r.completion_ids.shape and r.extras["n_turns"].max() > 1
    mine = r.policy_mask.bool()
    torch.testing.assert_close(r.extras["values"][mine], r.extras["hidden"].sum(-1)[mine], atol=1e-4, rtol=1e-4)
    assert (r.extras["values"][~mine] == 0).all()


def test_markers_across_tokens():
    tok = build_tokenizer(["</c>", "<", "/", "c", ">", "1"], "m")
    m = Marker(tok, "</c>"); m.start()
    ids = [tok.get_vocab()[x] for x in ["1", "<", "/", "c", ">", "1", "</c>", ">"]]
    assert [m.ends_in(0, x) for x in ids] == [False]*4 + [True, False, True, False]
    assert m.ends_in(1, tok.get_vocab()[">"]) is False           # another row begins afresh


def test_what_cannot_work_is_refused(policy):
    inner = TorchSampler(policy.model, policy.tokenizer, 40)
    class NoTool(World): pass
    with pytest.raises(ValueError, match="has no call_end"): TurnSampler(inner, NoTool())
    assert with_turns(inner, NoTool()) is inner and with_turns(inner, None) is inner
    with pytest.raises(ValueError, match="max_turns=0"): TurnSampler(inner, Echo(), max_turns=0)
    class NoThought(Echo): think_tags = None
    with pytest.raises(ValueError, match="no think_tags"): TurnSampler(inner, NoThought(), think_budget=3)
    with pytest.raises(ValueError, match="leaves no room"): draw(turns(policy, length=128), policy, 2)


# ---------------------------------------------------------------- in training
def train(policy, out, world, **kw):
    args = training_config(out, num_problems=4, num_generations=4, updates=2, max_completion_length=24, learning_rate=1e-3, seed=1)
    t = Trainer(policy.copy(), world, world.problems(16), Method(), args, **kw)
    t.train()
    return t

def weights(t): return torch.cat([p.detach().flatten() for p in t.policy.model.parameters()])


def test_plain_grpo_on_a_world_with_a_tool(policy, tmp_path):
    a, b = train(policy, tmp_path/"a", Echo()), train(policy, tmp_path/"b", Echo())
    assert torch.equal(weights(a), weights(b)) and weights(a).isfinite().all() and not torch.equal(weights(a), torch.cat([p.flatten() for p in policy.model.parameters()]))
    assert isinstance(a.sampler, TurnSampler) and a.rollouts.extras["n_turns"].max() > 1
    assert a.n_sampled < 2*16*24 and (a.rollouts.policy_mask.sum() < a.rollouts.completion_mask.sum())


def test_i1_observations_are_read_and_not_trained(policy, tmp_path):
    "The mask that reaches the loss is the policy's own tokens; another text of the observation leaves the mask of what the policy wrote."
    seen = []
    class Watch(Method):
        def token_loss(self, step, loss): seen.append((step.mask.clone(), step.rollouts.policy_mask.clone())); return loss
    args = training_config(tmp_path, num_problems=4, num_generations=4, updates=1, max_completion_length=24, seed=1)
    t = Trainer(policy.copy(), Echo(), Echo().problems(16), Watch(), args)
    t.train()
    assert len(seen) == 1 and torch.equal(seen[0][0].long(), seen[0][1])
    assert (t.rollouts.policy_mask[t.rollouts.completion_mask == 0] == 0).all()


def test_a_world_without_a_tool_is_sampled_as_before(tmp_path):
    from rlworkbench.worlds.base import make_world
    chain = make_world("chain", steps=2)
    tokenizer = build_tokenizer(chain.vocab, "chain", 64)
    torch.manual_seed(0)
    policy = Policy(tiny_model(len(tokenizer), 32, 1, 32, 64), tokenizer, "chain")
    args = training_config(tmp_path, num_problems=2, num_generations=2, updates=1, max_completion_length=8)
    assert type(Trainer(policy, chain, chain.problems(4), None, args).sampler) is TorchSampler
