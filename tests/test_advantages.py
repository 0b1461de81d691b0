"Advantages against plain loops, against TRL's own arithmetic, and under padding, order and precision."
import math
import warnings

import pytest
import torch
from torch import tensor

from rlworkbench.advantages import gae, group_advantages, group_mean, mixed, returns_to_go, terminal_rewards, to_tokens, whiten

nan = math.nan
SIZES = [(1, 1), (1, 7), (3, 1), (4, 6), (8, 13)]


def batch(seed, B, T, dtype=torch.float64):
    "Rewards, values and a mask of ragged rows, some of them empty, some with holes; nan under the mask."
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, T + 1, (B, 1), generator=g)
    mask = (torch.arange(T) < lengths) & (torch.rand(B, T, generator=g) > .2)
    rewards, values = (torch.randn(B, T, generator=g, dtype=dtype).masked_fill(~mask, nan) for _ in range(2))
    return rewards, values, mask.long()


# ---- groups

def loop_group(rewards, group, eps, ddof, floor, scale):
    out = []
    for r, g in zip(rewards, group):
        peers = [x for x, h in zip(rewards, group) if h == g and not math.isnan(x)]
        if math.isnan(r) or len(set(peers)) < 2:
            out.append(0.)
            continue
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((x - mean)**2 for x in peers) / (len(peers) - ddof))
        out.append((r - mean) / (max(std, floor) + eps) if scale else r - mean)
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("B,n_groups", [(1, 1), (5, 2), (24, 5), (40, 40)])
@pytest.mark.parametrize("eps,ddof,floor,scale", [(1e-4, 1, 0., True), (0., 0, 0., True), (1e-6, 1, .3, True), (1e-4, 1, 0., False)])
def test_group_advantages_equal_the_loop(seed, B, n_groups, eps, ddof, floor, scale):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (B,), generator=g).double() / 3
    rewards[torch.rand(B, generator=g) < .15] = nan
    group = torch.randint(0, n_groups, (B,), generator=g) * 1000 - 7
    got = group_advantages(rewards, group, eps=eps, ddof=ddof, floor=floor, scale=scale)
    assert torch.allclose(got, tensor(loop_group(rewards.tolist(), group.tolist(), eps, ddof, floor, scale)).double(), atol=1e-12 if eps != 1e-4 else 1e-6)
    order = torch.randperm(B, generator=g)
    assert torch.allclose(group_advantages(rewards[order], group[order], eps=eps, ddof=ddof, floor=floor, scale=scale), got[order], atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("G", [2, 4, 8])
def test_group_advantages_equal_trl(seed, G):
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    g = torch.Generator().manual_seed(seed)
    rewards = torch.rand(6 * G, generator=g).round(decimals=1)
    rewards[:G] = 1.                                             # one class
    rewards[torch.rand(len(rewards), generator=g) < .2] = nan    # and some that nobody could score
    grouped = rewards.view(-1, G)
    expected = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    group = torch.arange(6).repeat_interleave(G)
    assert torch.allclose(group_advantages(rewards, group), expected.view(-1).nan_to_num(nan=0.), atol=1e-5)
    centred = (grouped - grouped.nanmean(1, keepdim=True)).view(-1).nan_to_num(nan=0.)
    assert torch.allclose(group_advantages(rewards, group, scale=False), centred, atol=1e-6)


@pytest.mark.parametrize("rewards", [[1., 1., 1., 1.], [0., 0., 0., 0.], [1.], [.1] * 8, [.7] * 6, [nan, nan], [1., nan]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a1_no_spread(rewards, dtype):
    r = tensor(rewards, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"eps": 0.}, {"ddof": 0, "eps": 0.}, {"scale": False}):
            assert torch.equal(group_advantages(r, torch.zeros(len(r), dtype=torch.long), **options), torch.zeros_like(r))


def test_a1_the_tempting_version_is_not_exactly_zero():
    r = torch.full((8,), .1)                                    # its float mean is a little beside .1
    tempting = (r - r.mean()) / (r.std() + 1e-8)
    assert tempting.abs().max() > .1 and group_advantages(r, torch.zeros(8, dtype=torch.long), eps=1e-8).abs().max() == 0


def test_a2_per_group_baseline():
    r, group = tensor([1., 0, 0, 0, 1, 1, 1, 0]), tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert group_advantages(r, group, scale=False).tolist() == [.75, -.25, -.25, -.25, .25, .25, .25, -.75]
    assert (r - r.mean()).tolist() == [.5, -.5, -.5, -.5, .5, .5, .5, -.5]   # one baseline for the batch is another thing


def test_a3_spread_convention():
    r, group = tensor([1., 0, 0, 0]), torch.zeros(4, dtype=torch.long)
    assert torch.allclose(group_advantages(r, group, eps=0), tensor([1.5, -.5, -.5, -.5]))
    assert torch.allclose(group_advantages(r, group, eps=0, ddof=0), tensor([1.7321, -.5774, -.5774, -.5774]), atol=1e-4)
    assert torch.allclose(group_advantages(r, group), tensor([1.5, -.5, -.5, -.5]) * .5 / .5001)   # the default is the sample spread


def test_valid_equals_nan_and_mean_skips_both():
    r, group, valid = tensor([1., 5., 0., 2.]), tensor([0, 0, 0, 1]), tensor([1, 0, 1, 1])
    hidden = tensor([1., nan, 0., 2.])
    assert torch.equal(group_advantages(r, group, valid=valid), group_advantages(hidden, group))
    assert torch.equal(group_mean(r, group, valid), tensor([.5, .5, .5, 2.])) and torch.equal(group_mean(hidden, group), tensor([.5, .5, .5, 2.]))
    assert mixed(r, group, valid).tolist() == [True, True, True, False]


def test_inputs_stay_as_they_are_and_results_are_detached():
    r = tensor([1., nan, 0.], requires_grad=True)
    before = r.detach().clone()
    assert not group_advantages(r, tensor([0, 0, 0])).requires_grad and torch.equal(r.detach().nan_to_num(9.), before.nan_to_num(9.))
    v = torch.randn(2, 3, requires_grad=True)
    assert not any(x.requires_grad for x in (*gae(v, v, torch.ones(2, 3)), whiten(v, torch.ones(2, 3)), returns_to_go(v, torch.ones(2, 3))))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16])
def test_rewards_of_other_types_are_read_as_float32(dtype):
    r = tensor([1, 0, 0, 0]).to(dtype)
    assert torch.allclose(group_advantages(r, torch.zeros(4, dtype=torch.int32), eps=0), tensor([1.5, -.5, -.5, -.5]))


# ---- tokens

def loop_returns(r, m, gamma):
    after, out = 0., [0.] * len(r)
    for t in reversed(range(len(r))):
        if m[t]: after = out[t] = r[t] + gamma * after
    return out


def loop_gae(r, v, m, gamma, lam):
    "On the valid tokens alone, written back to their places."
    places = [t for t in range(len(m)) if m[t]]
    advantages, returns = [0.] * len(m), [0.] * len(m)
    for i, t in enumerate(places):
        total = 0.
        for j, u in enumerate(places[i:]):
            later = v[places[i + j + 1]] if i + j + 1 < len(places) else 0.
            total += (gamma * lam)**j * (r[u] + gamma * later - v[u])
        advantages[t], returns[t] = total, total + v[t]
    return advantages, returns


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("B,T", SIZES)
@pytest.mark.parametrize("gamma,lam", [(1., .95), (.9, .5), (1., 1.), (.99, 0.)])
def test_gae_and_returns_equal_the_loop(seed, B, T, gamma, lam):
    rewards, values, mask = batch(seed, B, T)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    togo = returns_to_go(rewards, mask, gamma)
    for i in range(B):
        a, g = loop_gae(rewards[i].tolist(), values[i].tolist(), mask[i].tolist(), gamma, lam)
        assert torch.allclose(advantages[i], tensor(a, dtype=torch.float64)) and torch.allclose(returns[i], tensor(g, dtype=torch.float64))
        assert torch.allclose(togo[i], tensor(loop_returns(rewards[i].tolist(), mask[i].tolist(), gamma), dtype=torch.float64))
    if lam == 1: assert torch.allclose(returns, togo)


def test_a13_gae_with_padding():
    r, v, m = tensor([[0., 0, 1, 0]]), tensor([[.2, .4, .6, 50]]), tensor([[1, 1, 1, 0]])
    advantages, returns = gae(r, v, m, gamma=1., lam=.95)
    assert torch.allclose(advantages, tensor([[.751, .58, .4, 0]])) and torch.allclose(returns, tensor([[.951, .98, 1., 0]]))


def test_a13_the_leak_is_another_number():
    # the padded state counted: A_4 = -50, A_3 = 1 + 50 - .6 - .95*50 = 2.9, A_2 = .2 + .95*2.9 = 2.955, A_1 = .2 + .95*2.955
    leak, _ = gae(tensor([[0., 0, 1, 0]]), tensor([[.2, .4, .6, 50]]), torch.ones(1, 4))
    assert torch.allclose(leak, tensor([[3.00725, 2.955, 2.9, -50.]]), atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_padding_rows_and_precision_change_nothing(seed):
    rewards, values, mask = batch(seed, 5, 9)
    wide = [torch.cat([x, torch.full((5, 4), nan, dtype=x.dtype)], 1) for x in (rewards, values)]
    wide_mask = torch.cat([mask, torch.zeros(5, 4, dtype=mask.dtype)], 1)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    for f in (lambda r, v, m: gae(r, v, m)[0], lambda r, v, m: gae(r, v, m)[1], lambda r, v, m: returns_to_go(r, m, .9), lambda r, v, m: whiten(v, m)):
        out = f(rewards, values, mask)
        assert out.dtype == torch.float64 and torch.equal(out[mask == 0], torch.zeros((mask == 0).sum(), dtype=torch.float64))
        assert torch.allclose(f(*wide, wide_mask)[:, :9], out) and torch.allclose(f(rewards[order], values[order], mask[order]), out[order])
        assert torch.allclose(f(rewards.float(), values.float(), mask.bool()).double(), out, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("B,T", SIZES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_whiten_equals_the_loop(seed, B, T, ddof):
    _, values, mask = batch(seed, B, T)
    kept = [x for row, m in zip(values.tolist(), mask.tolist()) for x, k in zip(row, m) if k]
    mean = sum(kept) / max(len(kept), 1)
    variance = sum((x - mean)**2 for x in kept) / max(len(kept) - ddof, 1)
    for shift in (True, False):
        expected = [[(x - mean) / math.sqrt(variance + 1e-8) + (0 if shift else mean) if k else 0. for x, k in zip(row, m)] for row, m in zip(values.tolist(), mask.tolist())]
        assert torch.allclose(whiten(values, mask, ddof=ddof, shift_mean=shift), tensor(expected, dtype=torch.float64))


def test_whitening_with_the_padding_in_is_another_number():
    x, m = tensor([[1., 3., 0., 0.]]), tensor([[1, 1, 0, 0]])
    assert torch.allclose(whiten(x, m), tensor([[-.7071, .7071, 0, 0]]), atol=1e-4)      # std of 1, 3 is sqrt 2
    assert not torch.allclose(whiten(x, torch.ones_like(m))[:, :2], whiten(x, m)[:, :2], atol=.1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("B,T", SIZES)
def test_tokens_and_terminal_rewards_equal_the_loop(seed, B, T):
    _, _, mask = batch(seed, B, T)
    outcomes = torch.arange(1., B + 1)
    spread, terminal = to_tokens(outcomes, mask), terminal_rewards(outcomes, mask)
    for i in range(B):
        places = [t for t in range(T) if mask[i, t]]
        assert spread[i].tolist() == [outcomes[i].item() if t in places else 0. for t in range(T)]
        assert terminal[i].tolist() == [outcomes[i].item() if places and t == places[-1] else 0. for t in range(T)]


def test_what_is_refused():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 2\)"): gae(ones[:, :2], ones, ones)
    with pytest.raises(ValueError, match=r"values has shape \(3,\)"): whiten(ones[0], ones)
    with pytest.raises(ValueError, match="only 0 and 1, got values from 0.5 to 0.5"): returns_to_go(ones, ones / 2)
    with pytest.raises(ValueError, match=r"\(B, T\)"): gae(ones[0], ones[0], ones[0])
    with pytest.raises(ValueError, match="integers"): group_advantages(ones[0], ones[0])
    with pytest.raises(ValueError, match="floor=-1"): group_advantages(ones[0], torch.zeros(3, dtype=torch.long), floor=-1)
    with pytest.raises(ValueError, match="1 of 2 outcomes are nan"): terminal_rewards(tensor([1., nan]), ones)
