"Cutting rollouts: beyond the examples of nbs/toolbox/cutting.ipynb. Cuts of a sampler and of a training run are in test_espo.py."
import pytest
import torch
from rlworkbench.rollouts import Rollouts, Stop, TorchSampler
from rlworkbench.toolbox.cutting import can_stop, cut_rollouts, level_for, random_stops, saved_frac, shadow, top
from tiny import LETTERS, constant_model, letters


def test_cut_rollouts_leaves_other_rows_alone():
    ones = torch.ones(3, 4, dtype=torch.long); mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    r = Rollouts(ones[:, :1], ones[:, :1], torch.arange(12).view(3, 4) + 5, mask, mask, -torch.ones(3, 4)*mask, torch.arange(3), torch.zeros(3), torch.tensor([1, 0, 0]),
                 completions=["a", "b", "c"], extras=dict(hidden=torch.ones(3, 4, 2), note=["x", "y", "z"]))
    cut = cut_rollouts(r, torch.tensor([0, -1, 2]), pad_id=9)
    assert cut.completion_ids.tolist() == [[5, 9, 9], [9, 10, 9], [13, 14, 15]]
    assert cut.lengths.tolist() == [1, 2, 3] and cut.stop.tolist() == [int(Stop.CUT), 0, int(Stop.CUT)]
    assert cut.completions == ["", "b", ""] and cut.extras["note"] == ["x", "y", "z"] and cut.extras["full_lengths"].tolist() == [4, 2, 3]
    assert cut.extras["hidden"].sum((1, 2)).tolist() == [2., 4., 6.]
    assert r.lengths.tolist() == [4, 2, 3]                                # the record that came in is as it was


def test_a_later_cut_changes_nothing_that_came_before():
    torch.manual_seed(0)
    n = torch.randint(1, 9, (20,)); mask = (torch.arange(8) < n[:, None]).long()
    ids, ones = torch.randint(3, 9, (20, 8))*mask, torch.ones(20, 1, dtype=torch.long)
    r = Rollouts(ones, ones, ids, mask, mask, -torch.rand(20, 8)*mask, torch.arange(20), torch.zeros(20), torch.zeros(20, dtype=torch.long), extras=dict(values=torch.rand(20, 8)*mask))
    t = (torch.rand(20)*n).long()
    once = cut_rollouts(r, t)
    twice = cut_rollouts(cut_rollouts(r, torch.minimum(t + 1, n - 1)), t)
    for name in ("completion_ids", "completion_mask", "policy_mask", "logps", "stop"): assert torch.equal(getattr(once, name), getattr(twice, name)), name
    assert torch.equal(once.extras["values"], twice.extras["values"])
    assert once.lengths.tolist() == (t + 1).tolist() and (once.stop == Stop.CUT).all()
    assert saved_frac(once, t >= 0) == pytest.approx(1 - (t + 1).sum().item()/n.sum().item())


def test_random_stops_keep_their_rate_and_are_uniform():
    torch.manual_seed(0)
    t = random_stops(torch.rand(40000, 2), torch.full((40000,), 10), .3)
    share = torch.bincount(t[t >= 0], minlength=10)/40000
    assert (share - .03).abs().max() < .005 and len(share) == 10
    assert (random_stops(torch.rand(9, 2), torch.full((9,), 10), 0.) == -1).all()
    assert (random_stops(torch.rand(999, 2), torch.full((999,), 1), 1.) == 0).all()


@pytest.mark.parametrize("rate", (.1, .25, .5))
def test_level_stops_its_share(rate):
    torch.manual_seed(0)
    scores, mask = torch.randn(400, 12), (torch.arange(12) < torch.randint(1, 13, (400, 1))).long()
    stopped = (top(scores, mask) > level_for(scores, mask, rate)).float().mean().item()
    assert stopped == pytest.approx(rate, abs=1/400)
    assert torch.equal(top(scores, mask), torch.stack([s[m.bool()].max() for s, m in zip(scores, mask)]))


@pytest.mark.parametrize("length", (1, 5))
def test_the_end_token_is_never_a_place_to_stop(length):
    mask = torch.cat([torch.ones(2, length), torch.zeros(2, 3)], 1)
    assert can_stop(mask, torch.tensor([True, False])).sum(1).tolist() == [length - 1, length]


def test_a_cut_rollout_whose_prompt_no_longer_fits_is_not_taken_as_continued():
    # context 18; the longest tail is 8 - 1 = 7 tokens, so 18 - 7 = 11 are left for prompt and prefix: 4 + 1 fit, 10 + 6 do not
    logits = [0.]*(len(LETTERS) + 3); logits[2] = 30.                           # it ends at once
    sampler = TorchSampler(constant_model(logits, context=18), letters(), max_new_tokens=8)
    long, wide = torch.full((2, 10), 4), torch.full((2, 6), 5)
    seen = torch.tensor([[0]*6 + [1]*4, [1]*10]); written = torch.tensor([[1, 0, 0, 0, 0, 0], [1]*6])
    r = Rollouts(long*seen, seen, wide*written, written, written, -torch.ones(2, 6)*written, torch.arange(2), torch.zeros(2), torch.full((2,), int(Stop.CUT)), completions=["c", "cccccc"])
    texts, whole = shadow(sampler, r, torch.tensor([0, 1]))
    assert whole == [True, False] and texts[0] == "c"
