import math

import pytest
import torch
from tiny import constant_model, random_model
from torch import tensor

from rlworkbench.rollouts import TorchSampler, pad_left
from rlworkbench.scoring import score, score_rollouts, token_scores

PROMPTS = [[1, 5, 6, 7], [1, 8], [1, 5, 5, 9, 10, 11, 12, 4, 3], [1, 18]]


@pytest.fixture(scope="module")
def model(): return random_model()


def close(a, b, atol=1e-4): torch.testing.assert_close(a, b, atol=atol, rtol=0)


def sampled(model, prompts, **kw):
    torch.manual_seed(3)
    return TorchSampler(model, **{**dict(max_new_tokens=24, eos_ids=[2, 7, 11, 14]), **kw}).sample(prompts)


def test_r4_uniform_output():
    "Three tokens out of ten: -3 ln 10 = -6.9078."
    s = score(constant_model([0.] * 10), tensor([[1, 5]]), tensor([[1, 1]]), tensor([[3, 4, 5]]), torch.ones(1, 3), want=("logps", "entropies"))
    close(s.logps.sum(), tensor(-6.9078))
    close(s.entropies, torch.full((1, 3), math.log(10)))


def test_r4_left_padding_does_not_shift(model):
    ids, done = tensor([[1, 5, 6, 7]]), tensor([[8, 9, 3]])
    plain = score(model, ids, torch.ones(1, 4), done, torch.ones(1, 3)).logps
    padded = score(model, torch.cat([torch.zeros(1, 4).long(), ids], 1), tensor([[0] * 4 + [1] * 4]), done, torch.ones(1, 3)).logps
    beside = score(model, *pad_left([[1, *[5] * 7], [1, 5, 6, 7]]), done.repeat(2, 1), torch.ones(2, 3)).logps[1:]
    close(plain, padded); close(plain, beside)
    wrong = torch.cat([torch.zeros(1, 4).long(), ids], 1)      # without the mask the pads are read
    assert (score(model, wrong, torch.ones(1, 8), done, torch.ones(1, 3)).logps - plain).abs().max() > 1e-2


@pytest.mark.parametrize("temperature", [1., .6, 1.7])
@pytest.mark.parametrize("prompts", [PROMPTS * 4, [[1, 5, 6], [1, 7, 8]] * 8], ids=["left padding", "no padding"])
def test_sampled_and_scored_log_probabilities_agree(model, prompts, temperature):
    r = sampled(model, prompts, temperature=temperature, value_fn=lambda h: h.sum(-1), keep=("hidden",))
    assert r.lengths.unique().numel() > 3 and r.completion_ids.unique().numel() > 8
    s = score_rollouts(model, r, temperature=temperature, want=("logps", "hidden"), batch_size=5)
    close(s.logps, r.logps); close(s.hidden[-1], r.extras["hidden"]); close(s.hidden[-1].sum(-1), r.extras["values"], atol=1e-3)


def test_a11_temperature_on_both_sides():
    "Logits 3, 1, 0 at temperature 0.6: -0.0415 on both sides, ratio 1; scored without the temperature the ratio would be 1.1369 the other way round."
    model = constant_model([3., 1., 0.])
    r = sampled(model, [[1]] * 20, max_new_tokens=4, temperature=.6, eos_ids=[])
    zero = r.completion_ids == 0
    trained = score_rollouts(model, r, temperature=.6).logps
    close(trained[zero], torch.full_like(trained[zero], -.0415)); close((trained - r.logps).exp(), torch.ones_like(r.logps), atol=1e-5)
    onesided = score_rollouts(model, r).logps
    close((r.logps - onesided)[zero].exp(), torch.full_like(r.logps[zero], 1.1369))


def test_logits_entropies_and_hidden_equal_the_models_own(model):
    r = sampled(model, PROMPTS)
    s = score_rollouts(model, r, temperature=.8, want=("logits", "entropies", "hidden", "attentions"), layers=(0, 1, 2, -1))
    for i in range(len(r)):
        prompt, n = PROMPTS[i], int(r.lengths[i])
        x, P = tensor([prompt + r.completion_ids[i, :n].tolist()]), len(prompt)
        model.set_attn_implementation("eager")
        with torch.no_grad(): out = model(x, output_hidden_states=True, output_attentions=True)
        model.set_attn_implementation("sdpa")
        close(s.logits[i, :n], out.logits[0, P-1:-1])
        p = (out.logits[0, P-1:-1] / .8).softmax(-1)
        close(s.entropies[i, :n], -(p * p.log()).sum(-1))
        for l in (0, 1, 2, -1): close(s.hidden[l][i, :n], out.hidden_states[l][0, P-1:-1])
        for l in (1, 2, -1):
            gap = r.prompt_ids.shape[1] - P
            close(s.attentions[l][i, :n, :, gap:gap + P + n], out.attentions[l - (l > 0)][0, :, P-1:-1].transpose(0, 1))
            assert s.attentions[l][i, :n, :, :gap].abs().sum() == 0
        assert s.logits[i, n:].abs().sum() == 0 and s.hidden[-1][i, n:].abs().sum() == 0


def test_micro_batches_chunks_and_row_order_change_nothing(model):
    r = sampled(model, PROMPTS * 3)
    want = ("logps", "entropies", "logits", "hidden", "attentions")
    whole = score_rollouts(model, r, want=want, layers=(1, -1))
    parts = score_rollouts(model, r, want=want, layers=(1, -1), batch_size=1, chunk=3)
    for name in ("logps", "entropies", "logits"): close(getattr(parts, name), getattr(whole, name))
    for l in (1, -1): close(parts.hidden[l], whole.hidden[l]); close(parts.attentions[l], whole.attentions[l])
    turned = score_rollouts(model, r.take(list(range(len(r)))[::-1]))
    close(turned.logps.flip(0), whole.logps)


def test_gradient_reaches_valid_tokens_only(model):
    r = sampled(model, PROMPTS)
    def gradient(mask, **kw):
        model.zero_grad()
        s = score(model, r.prompt_ids, r.prompt_mask, r.completion_ids, mask, grad=True, want=("logps", "entropies"), **kw)
        (s.logps.sum() + s.entropies.sum()).backward()
        return model.lm_head.weight.grad.clone(), model.model.layers[0].mlp.up_proj.weight.grad.clone()
    whole, parts = gradient(r.completion_mask), gradient(r.completion_mask, batch_size=2, chunk=3)
    for a, b in zip(whole, parts): close(a, b, atol=2e-4 * float(a.abs().max()))
    assert whole[0].abs().sum() > 0
    nothing = gradient(torch.zeros_like(r.completion_mask))
    assert all(g.abs().sum() == 0 for g in nothing)
    model.zero_grad()
    assert not score_rollouts(model, r).logps.requires_grad


def test_another_prompt_and_another_model(model):
    r = sampled(model, PROMPTS)
    hint = [[1, 9, 9, *p[1:]] for p in PROMPTS]
    s = score_rollouts(model, r, prompts=hint)
    for i, p in enumerate(hint):
        n = int(r.lengths[i])
        one = score(model, tensor([p]), torch.ones(1, len(p)), r.completion_ids[i:i+1, :n], torch.ones(1, n))
        close(s.logps[i, :n], one.logps[0])
    assert (score_rollouts(random_model(seed=1), r).logps - r.logps).abs().max() > .1


def test_adapter_off_is_the_reference(model):
    from peft import LoraConfig, get_peft_model
    r = sampled(model, PROMPTS)
    tuned = get_peft_model(random_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    assert (score_rollouts(tuned, r).logps - r.logps).abs().max() > 1e-3
    with tuned.disable_adapter(): close(score_rollouts(tuned, r).logps, r.logps)
    assert score_rollouts(tuned, r, want=("attentions",)).attentions[-1].shape[-1] == r.prompt_ids.shape[1] + r.completion_ids.shape[1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_other_families(family):
    from test_rollouts import families
    torch.manual_seed(0)
    model = families()[family]().eval()
    r = sampled(model, PROMPTS, eos_ids=[])
    close(score_rollouts(model, r).logps, r.logps)


def test_a_large_vocabulary_goes_through_the_head_in_chunks():
    "No call of the head sees more than the chunk, forward or backward."
    calls = []
    def head(h):
        calls.append(len(h))
        return h @ torch.ones(4, 50_000)
    h = torch.randn(700, 4, requires_grad=True)
    logps, entropies = token_scores(head, h, torch.zeros(700).long(), entropy=True)
    logps.sum().backward()
    assert max(calls) * 50_000 <= 2**24 and len(calls) > 4
    close(logps.detach(), torch.full((700,), -math.log(50_000)), atol=1e-3)


def test_float64_stays_float64():
    model = random_model().double()
    r = sampled(model, PROMPTS)
    s = score_rollouts(model, r)
    assert r.logps.dtype == s.logps.dtype == torch.float64
    close(s.logps, r.logps, atol=1e-10)


def test_nothing_valid_gives_zeros(model):
    s = score(model, tensor([[1, 5]]), torch.ones(1, 2), tensor([[3, 4]]), torch.zeros(1, 2), want=("logps", "entropies"))
    assert s.logps.tolist() == [[0., 0.]] and s.entropies.tolist() == [[0., 0.]]


def test_dropout_is_off_without_a_gradient():
    model = random_model()
    r = sampled(model, PROMPTS)
    for layer in model.model.layers: layer.self_attn.attention_dropout = .5
    model.train()
    close(score_rollouts(model, r).logps, r.logps)
    assert model.training


@pytest.mark.parametrize("kw, words", [(dict(want=("logprobs",)), "want knows"), (dict(temperature=0.), "temperature"), (dict(prompts=[[1]]), "one entry for each of 4")])
def test_refused(model, kw, words):
    with pytest.raises(ValueError, match=words): score_rollouts(model, sampled(model, PROMPTS), **kw)


def test_refused_right_padded_prompts(model):
    with pytest.raises(ValueError, match="left-padded"): score(model, tensor([[1, 5]]), tensor([[1, 0]]), tensor([[3]]), torch.ones(1, 1))
