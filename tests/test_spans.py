"Units and tokens across tokenisations, and the cases of process labels and step splitting."
import random

import pytest
import torch
from torch import tensor

from rlworkbench.spans import last_tokens, match_spans, positive_frac, split_spans, token_offsets, unit_ids, unit_labels, unit_mean, units_to_tokens


def cut(text, rng, longest=4):
    "The text as random pieces, among them empty ones."
    pieces = []
    while text:
        n = rng.randint(0, longest)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


def test_e3_ignore_labels():
    labels = unit_labels(tensor([0, 0, 0, 1, 1]), tensor([False, True]))
    assert labels.tolist() == [-100, -100, 0, -100, 1] and labels.dtype == torch.int64
    assert positive_frac(labels) == .5
    assert labels.bool().float().mean().item() == pytest.approx(.8)   # what a boolean label tensor would report


@pytest.mark.parametrize("first", ["\n\n", "\n\n\n", "\n\n\n\n"])
@pytest.mark.parametrize("second", ["\n\n ", "\n\n   \n", "\n \n", "\n\n\n\t\n "])
def test_e4_phantom_steps(first, second):
    text = f"A{first}B{second}C\n\n\n"
    spans = split_spans(text)
    assert [text[s:e] for s, e in spans] == ["A", "B", "C"]
    units = unit_ids(token_offsets(list(text)), spans)
    scores = unit_mean(torch.arange(len(text), dtype=torch.float), units, len(spans))
    assert scores.tolist() == [float(text.index(c)) for c in "ABC"]   # as many scores as steps, each its own token


def test_e4_empty_answer_and_no_separator():
    assert split_spans("") == [] and split_spans("\n\n\n") == [] and split_spans("  ") == []
    assert split_spans("one step") == [(0, 8)]
    units = unit_ids(token_offsets(["\n", "\n"]), [])
    assert unit_mean(torch.ones(2), units, 0).shape == (0,) and unit_labels(units, []).tolist() == [-100, -100]


def loop_units(offsets, spans):
    units = []
    for start, end in offsets.tolist():
        shared = [len(set(range(start, end)) & set(range(s, e))) for s, e in spans]
        best = max(shared, default=0)
        units.append(shared.index(best) if best else -1)
    return units


@pytest.mark.parametrize("seed", range(5))
def test_unit_ids_equal_the_loop_over_characters(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "bc", "\n\n", " ", "d\n\n"]) for _ in range(40))
    offsets, spans = token_offsets(cut(text, rng)), split_spans(text)
    assert unit_ids(offsets, spans).tolist() == loop_units(offsets, spans)


@pytest.mark.parametrize("seed", range(5))
def test_another_tokenisation_moves_no_unit(seed):
    rng, text = random.Random(seed), "12+5=17\n\n17-3=14\n\n14*2=28\n\n#28"
    spans = split_spans(text)
    for pieces in (list(text), cut(text, rng), cut(text, rng, 2)):
        offsets = token_offsets(pieces)
        last = last_tokens(unit_ids(offsets, spans), len(spans))
        for (_, end), token in zip(spans, last.tolist()):     # the last token of a unit writes, or shares a piece with, its last character
            assert offsets[token, 0] < end and offsets[token, 1] >= end - 3
        # character weights summed per unit do not depend on the cut
        lengths = (offsets[:, 1] - offsets[:, 0]).float()
        assert lengths.sum() == len(text)


@pytest.mark.parametrize("seed", range(5))
def test_unit_functions_equal_the_loop(seed):
    g = torch.Generator().manual_seed(seed)
    T, S = 17, 4
    units, values = torch.randint(-1, S, (T,), generator=g), torch.randn(T, generator=g, dtype=torch.float64)
    members = [[t for t in range(T) if units[t] == s] for s in range(S + 1)]          # one more unit, without tokens
    mean, last = unit_mean(values, units, S + 1), last_tokens(units, S + 1)
    for s, ts in enumerate(members):
        assert last[s] == (ts[-1] if ts else -1)
        assert mean[s].isnan() if not ts else abs(mean[s] - sum(values[t] for t in ts) / len(ts)) < 1e-12
    down = units_to_tokens(torch.arange(S + 1.), units, fill=-5.)
    assert down.tolist() == [float(u) if u >= 0 else -5. for u in units.tolist()]


def test_more_tokens_outside_change_nothing():
    units, values = tensor([0, 0, 1]), tensor([1., 3., 5.])
    wider, more = tensor([-1, 0, 0, -1, 1, -1]), tensor([9., 1., 3., 9., 5., 9.])
    assert unit_mean(values, units, 2).tolist() == unit_mean(more, wider, 2).tolist() == [2., 5.]


def test_gradient_reaches_only_the_tokens_of_units():
    values = torch.randn(4, requires_grad=True)
    unit_mean(values, tensor([0, -1, 0, 1]), 2)[0].backward()
    assert values.grad.tolist() == [.5, 0., .5, 0.]


def test_match_spans_take_the_group_that_is_asked_for():
    assert match_spans("a=1;b=22;", r"(\w)=(\d+);", group=2) == [(2, 3), (6, 8)]
    with pytest.raises(IndexError): match_spans("a", "a", group=1)


def test_what_is_refused():
    with pytest.raises(ValueError, match="one string"): token_offsets("abc")
    with pytest.raises(ValueError, match=r"\(3,\)"): unit_ids(tensor([1, 2, 3]), [(0, 1)])
    with pytest.raises(ValueError, match="for 1 units, got 0…1"): last_tokens(tensor([0, 1]), 1)
    with pytest.raises(ValueError, match="one for each unit"): unit_labels(tensor([0, 1]), True)
