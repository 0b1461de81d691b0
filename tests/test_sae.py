"Sparse autoencoders: the card's numbers, dead latents, prompts that are read the same whatever stands beside them."
import copy, warnings
import pytest
import torch
from rlworkbench.policies import Recipe, Stage, load_policy, seeded, train_recipe
from rlworkbench.toolbox.sae import (FiringWindow, PromptReader, SparseAutoencoder, fvu, never_fires, pooled, prompt_states, revival_loss, scaled_codes, topk, train_reader, train_sae, warn_dead)
from rlworkbench.worlds.base import make_world

WORLD = make_world("families", corrupt=0.)
MINI = Recipe("mini", "families", (Stage(8, 3e-3),), dials=dict(corrupt=0.), width=32, layers=2, context=64)


@pytest.fixture(scope="module")
def policy(): return train_recipe(MINI, progress=False)


@pytest.fixture(scope="module")
def states():
    with seeded(3): return torch.randn(3000, 6)@torch.randn(6, 10) + 5


# ---------------------------------------------------------------- 1, 2: the formulas
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_i1_topk(dtype):
    assert topk(torch.tensor([3., 1., -2., 5.], dtype=dtype), 2).tolist() == [3., 0., 0., 5.]
    with seeded(0): pre = torch.randn(50, 7, 20, dtype=dtype)
    for k in (1, 3, 20):
        z = topk(pre, k)
        assert (z >= 0).all() and ((z > 0).sum(-1) <= k).all() and z.shape == pre.shape
        for row, got in zip(pre.view(-1, 20)[:20].tolist(), z.view(-1, 20)[:20].tolist()):     # the plain loop
            best = sorted(range(20), key=lambda i: -row[i])[:k]
            assert got == [max(v, 0.) if i in best else 0. for i, v in enumerate(row)]
    for k in (0, 21):
        with pytest.raises(ValueError, match=f"k={k}"): topk(pre, k)


def test_i2_fvu():
    x = torch.tensor([[3., 1.], [1., -1.]])
    assert fvu(x, torch.tensor([[2., 1.], [1., 0.]])) == .5
    assert fvu(x, x) == 0. and fvu(x, x.mean(0).expand(2, 2)) == 1.
    assert fvu(torch.ones(3, 2), torch.ones(3, 2)) != 0.                             # nothing varies: no number
    assert ((x - torch.tensor([[2., 1.], [1., 0.]]))**2).sum()/(x**2).sum() != .5    # the tempting mistake: energy in place of variance
    with pytest.raises(ValueError, match="one shape"): fvu(x, x[:1])


# ---------------------------------------------------------------- E5: dead latents
def test_e5_dead_share_falls_when_some_revive():
    window = FiringWindow(64, window=500)
    codes = torch.zeros(500, 64)
    codes[torch.arange(500), torch.arange(500) % 40] = 1.                           # 40 ever fire
    window.update(codes)
    assert window.dead_frac == .375 and window.dead[40:].all() and not window.dead[:40].any()
    more = torch.zeros(100, 64); more[50, 40:52] = 2.
    window.update(more)
    assert window.dead_frac == 12/64


@pytest.mark.parametrize("sizes", ((7,)*30, (1,)*210, (100, 110), (210,)))
def test_e5_the_window_does_not_depend_on_how_states_come(sizes):
    with seeded(5): codes = (torch.rand(210, 16) < .02).float()
    window, start = FiringWindow(16, window=60), 0
    for n in sizes: window.update(codes[start:start + n]); start += n
    assert torch.equal(window.dead, codes[-60:].sum(0) == 0)


def test_e5_no_dead_latent_enters_a_score():
    with seeded(0): codes, dead = torch.rand(40, 12), torch.arange(12) < 5
    z = scaled_codes(codes, dead)
    assert (z[:, :5] == 0).all() and (z[:, 5:].std(0, correction=0) - 1).abs().max() < 1e-5
    other = codes.clone(); other[:, :5] = torch.rand(40, 5)*100
    assert torch.equal(z, scaled_codes(other, dead)) and not torch.equal(scaled_codes(codes), scaled_codes(other))


def test_e5_a_limit_is_told():
    dead = torch.arange(64) < 33
    with pytest.warns(UserWarning, match=r"33 of 64 latents are dead \(52%, limit 50%\)"): assert warn_dead(dead) == 33/64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_dead(dead[:32] & (torch.arange(32) < 16)) == .5 and warn_dead(dead, .6) == 33/64


def test_e5_the_reader_warns(policy):
    prompts = [p.prompt for p in WORLD.problems(12)]
    with pytest.warns(UserWarning, match="latents are dead"): train_reader(policy, prompts, n_latents=400, k=1, steps=2, progress=False)


def test_the_help_reaches_dead_latents_alone(states):
    with seeded(0): sae = SparseAutoencoder(10, 12, 3)
    dead, x = torch.arange(12) < 4, states[:200]
    residual = x - sae(x)
    loss = revival_loss(sae, x, residual, dead)
    loss.backward()
    assert (sae.decoder.grad[4:] == 0).all() and (sae.encoder.grad[:, 4:] == 0).all() and (sae.encoder_bias.grad[4:] == 0).all()
    assert (sae.decoder.grad[:4] != 0).any() and (sae.encoder.grad[:, :4] != 0).any()
    silent = SparseAutoencoder(10, 12, 3)
    silent.encoder_bias.data.fill_(-1e9)                                            # explains nothing: exactly 1, whatever the size of the residual
    for scale in (1., 1e-3): assert abs(revival_loss(silent, x, residual*scale, dead).item() - 1) < 1e-6
    before = loss.item()
    optimizer = torch.optim.Adam([sae.decoder, sae.encoder, sae.encoder_bias], lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad(); revival_loss(sae, x, residual, dead).backward(); optimizer.step()
    assert revival_loss(sae, x, residual, dead).item() < .9*before                  # they take over some of it


# ---------------------------------------------------------------- training
def test_training_explains_the_states_and_keeps_columns_at_length_one(states):
    sae = train_sae(states, 32, 6, steps=300, batch=256, progress=False)
    assert fvu(states, sae(states)) < .1 and fvu(states*1000 + 7, train_sae(states*1000 + 7, 32, 6, steps=300, batch=256, progress=False)(states*1000 + 7)) < .1
    torch.testing.assert_close(sae.decoder.norm(dim=-1), torch.ones(32))
    z = sae.encode(states)
    assert ((z > 0).sum(-1) <= 6).all() and torch.equal(sae.dead, (z > 0).sum(0) == 0) and torch.equal(never_fires(sae, states, chunk=700), sae.dead)
    assert not any(p.requires_grad for p in sae.parameters())


def test_same_seed_same_code_and_the_generators_stay(states):
    torch.manual_seed(9); plain = torch.rand(1)
    torch.manual_seed(9); a = train_sae(states, 16, 2, steps=4, progress=False)
    assert torch.equal(torch.rand(1), plain)
    b = train_sae(states, 16, 2, steps=4, progress=False)
    assert a.key() == b.key() != train_sae(states, 16, 2, steps=4, seed=1, progress=False).key()
    back = SparseAutoencoder(10, 16, 2); back.load_state_dict(a.state_dict())
    assert back.key() == a.key() and torch.equal(back.encode(states), a.encode(states))


def test_bad_input_is_refused(states, policy):
    with pytest.raises(ValueError, match="k=9"): SparseAutoencoder(4, 8, 9)
    with pytest.raises(ValueError, match="width 10, the autoencoder was made for 4"): SparseAutoencoder(4, 8, 2).encode(states)
    with pytest.raises(ValueError, match=r"\(n, D\)"): train_sae(states[:0])
    with pytest.raises(ValueError, match="window=0"): FiringWindow(4, 0)
    with pytest.raises(ValueError, match="layer=3"): prompt_states(policy, ["1+2="], 3)
    with pytest.raises(ValueError, match="how='sum'"): pooled(torch.ones(1, 2, 3), torch.ones(1, 2), "sum")


# ---------------------------------------------------------------- prompts
def test_states_are_those_behind_the_block_without_padding_and_begin(policy):
    prompts = ["3+4+5=", "^371802=", "9-03-2="]
    states, mask = prompt_states(policy, prompts, 1)
    assert mask.sum(1).tolist() == [len(p) for p in prompts]                        # one token a character
    for i, p in enumerate(prompts):
        with torch.no_grad(): alone = policy.model(torch.tensor([policy.encode(p)]), output_hidden_states=True).hidden_states[1][0, 1:]
        torch.testing.assert_close(states[i][mask[i].bool()], alone, atol=1e-5, rtol=0)


def test_more_padding_other_order_and_batches_change_no_code(policy):
    prompts = [p.prompt for p in WORLD.problems(30)]
    reader = train_reader(policy, prompts, layer=1, n_latents=64, k=8, steps=60, progress=False, limit=1.)
    codes = reader.codes(prompts)
    torch.testing.assert_close(codes, torch.cat([reader.codes([p]) for p in prompts]), atol=1e-4, rtol=0)
    torch.testing.assert_close(codes, reader.codes(prompts[::-1]).flip(0), atol=1e-4, rtol=0)
    states, mask = prompt_states(policy, prompts, 1)
    wrong = pooled(reader.sae.encode(states), torch.ones_like(mask))                # the tempting mistake: padding is pooled too
    assert (wrong - codes).abs().max() > .01
    best = PromptReader(policy, reader.sae, 1, "max").codes(prompts)
    assert (best >= codes - 1e-5).all() and (codes >= 0).all()


def test_the_reader_does_not_move_with_the_policy(policy):
    moving, prompts = copy.deepcopy(policy), [p.prompt for p in WORLD.problems(10)]
    reader = train_reader(moving, prompts, n_latents=32, k=4, steps=5, progress=False, limit=1.)
    before, key = reader.codes(prompts), reader.key()
    with torch.no_grad():
        for p in moving.model.parameters(): p += .1
    assert torch.equal(before, reader.codes(prompts)) and key == reader.key() and reader.layer == 1


def test_rare_and_constant_latents_are_out():
    codes = torch.zeros(400, 3); codes[0, 0] = 1.; codes[:3, 1] = 1.; codes[:, 2] = 2.   # in 1 of 400 (.25 %), in 3 (.75 %), constant
    z = scaled_codes(codes)
    assert (z[:, 0] == 0).all() and (z[:, 1] != 0).all() and (z[:, 2] == 0).all()
