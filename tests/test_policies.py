"Policies across module borders: the shipped weights meet their gates, recipes repeat, the cache survives what happens to caches."
import json, os, random, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
import torch
from rlworkbench.policies import (RECIPES, Policy, Recipe, Stage, build_tokenizer, cache_dir, damage, load_policy, seeded, shipped_dir, tiny_model, train_recipe)
from rlworkbench.worlds.base import make_world

MINI = Recipe("mini", "chain", dials=dict(steps=(1, 2)), width=32, layers=1, batch=16, stages=(Stage(12, 1e-2), Stage(4, 1e-3, "habits", dict(slip=.3))))
slow = pytest.mark.skipif(not os.environ.get("RLWORKBENCH_SLOW"), reason="minutes of training: set RLWORKBENCH_SLOW=1")

@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLWORKBENCH_CACHE", str(tmp_path/"my cache é"))
    return tmp_path/"my cache é"

def same(p, q): return all(torch.equal(x, y) for x, y in zip(p.model.parameters(), q.model.parameters(), strict=True))

def accuracy(policy, world, problems, samples, max_new_tokens, seed=0):
    "(problems, samples) scores of sampled completions."
    ps = world.problems(problems, seed=seed, split="test")
    rows = [policy.encode(p.prompt) for p in ps for _ in range(samples)]
    P = max(map(len, rows))
    ids = torch.tensor([[0]*(P - len(r)) + r for r in rows])
    with seeded(seed), torch.no_grad():
        out = policy.model.generate(ids, attention_mask=(ids > 0).long(), do_sample=True, top_k=0, max_new_tokens=max_new_tokens)
    texts = [policy.decode(r[P:]) for r in out]
    return torch.tensor([world.verify(ps[i // samples], t) for i, t in enumerate(texts)]).view(problems, samples), texts

def check_chain_gate(policy, problems, samples, tolerance):
    for steps, start in ((3, .30), (6, .10), (8, .05)):
        world = make_world("chain", steps=steps)
        right, texts = accuracy(policy, world, problems, samples, 16*steps)
        careful, quick = (sum(t.count(c) for t in texts) for c in "[>")
        assert abs(right.mean() - start) < tolerance[steps], f"{steps} steps: {right.mean():.3f}"
        assert .4 < careful / (careful + quick) < .6
        if steps == 6: # groups of 8 with both right and wrong answers: what GRPO learns from
            mixed = ((right.mean(1) > 0) & (right.mean(1) < 1)).float().mean()
            assert mixed > .35, f"mixed groups {mixed:.2f}"

def test_shipped_chain_habits_meets_its_gate():
    # 512 samples carry about 2 points of standard error at .30, 1.3 at .10, 1 at .05; problems add as much again
    check_chain_gate(load_policy("chain-habits", device="cpu"), 64, 8, {3: .08, 6: .05, 8: .04})

def test_shipped_gym_chain_sum_meets_its_gate():
    policy = load_policy("gym-chain_sum", device="cpu")
    world = make_world(policy.recipe.world, **policy.recipe.dials)
    scores, texts = accuracy(policy, world, 64, 8, 8)
    right, certain = scores == 1, torch.tensor([t.startswith("=") for t in texts]).view(64, 8)
    assert .1 < right.float().mean() < .5
    assert .1 < certain.float().mean() < .4                       # the better opener is the rarer one
    assert right[certain].float().mean() > right[~certain].float().mean() + .25
    assert ((right.float().mean(1) > 0) & (right.float().mean(1) < 1)).float().mean() > .6   # mixed groups

@pytest.mark.parametrize("name", RECIPES)
def test_shipped_policies_are_what_their_recipes_say(name):
    folder = shipped_dir()/name
    assert damage(folder, RECIPES[name]) is None
    assert sum(f.stat().st_size for f in folder.iterdir()) < 1.6e6
    policy = load_policy(name, device="cpu")
    assert policy.recipe == RECIPES[name] and policy.tokenizer.eos_token_id == 2
    assert all(str(Path.home()) not in f.read_text() for f in folder.glob("*.json"))   # no machine's paths

@slow
@pytest.mark.slow
@pytest.mark.timeout(3000) # 2.5 minutes on two idle cores, ten on busy ones
def test_rebuilt_chain_habits_meets_the_same_gate(cache):
    policy = load_policy("chain-habits", device="cpu", rebuild=True)
    check_chain_gate(policy, 128, 8, {3: .08, 6: .05, 8: .04})
    assert damage(cache/"policies"/policy.recipe.key(), policy.recipe) is None

def test_same_recipe_same_weights_in_fresh_processes(cache, tmp_path):
    code = "import sys, torch; from tests.test_policies import MINI; from rlworkbench.policies import *; torch.set_num_threads(1); p = train_recipe(MINI, progress=False); p.save(sys.argv[1]); print(MINI.key())"
    keys = [subprocess.run([sys.executable, "-c", code, str(tmp_path/h)], env={**os.environ, "PYTHONHASHSEED": h}, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout for h in "12"]
    assert keys == [MINI.key() + "\n"]*2
    assert same(load_policy(tmp_path/"1", device="cpu"), load_policy(tmp_path/"2", device="cpu"))

def test_another_seed_other_weights():
    assert same(train_recipe(MINI, False), train_recipe(MINI, False))
    assert not same(train_recipe(MINI, False), train_recipe(replace(MINI, seed=1), False))

@pytest.mark.parametrize("how", [dict(), dict(lora=2), dict(rebuild=True)])
def test_loading_leaves_the_global_generators_alone(cache, how):
    def dice(): return random.random(), np.random.rand(), torch.rand(1).item()
    def state(): random.seed(5); np.random.seed(5); torch.manual_seed(5)
    state(); plain = dice()
    state(); load_policy(MINI, device="cpu", **how); assert dice() == plain
    state(); load_policy("chain-habits", device="cpu", **{k: v for k, v in how.items() if k != "rebuild"}); assert dice() == plain

def test_going_on_from_a_policy_keeps_its_vocabulary_and_caches_both(cache):
    more = MINI.then(Stage(3, 1e-3, "habits", dict(slip=.5, careful=.2)), name="more slips")
    start, policy = load_policy(MINI, device="cpu"), load_policy(more, device="cpu")
    assert policy.name == "more slips" and policy.recipe == more and policy.tokenizer.get_vocab() == start.tokenizer.get_vocab()
    assert not same(start, policy) and same(policy, load_policy(more, device="cpu")) and same(start, load_policy(MINI, device="cpu"))
    assert {p.name for p in (cache/"policies").iterdir() if p.is_dir()} == {MINI.key(), more.key()}

@pytest.mark.parametrize("harm", ["truncated", "missing", "manifest", "garbage tokenizer", "a file"])
def test_damaged_cache_is_told_and_rebuilt(cache, harm):
    built = load_policy(MINI, device="cpu")
    folder = cache/"policies"/MINI.key()
    weights = folder/"model.safetensors"
    if harm == "truncated": weights.write_bytes(weights.read_bytes()[:1000])
    if harm == "missing": weights.unlink()
    if harm == "manifest": (folder/"policy.json").write_text("{")
    if harm == "garbage tokenizer": (folder/"tokenizer.json").write_text("{}")
    if harm == "a file":
        for f in folder.iterdir(): f.unlink()
        folder.rmdir(); folder.write_text("")
    with pytest.warns(UserWarning, match="damaged"): again = load_policy(MINI, device="cpu")
    assert same(built, again) and damage(folder, MINI) is None

def test_unwritable_cache_names_the_setting_before_training(tmp_path, monkeypatch):
    (tmp_path/"file").write_text("")
    monkeypatch.setenv("RLWORKBENCH_CACHE", str(tmp_path/"file"/"below"))
    start = time.time()
    with pytest.raises(OSError, match="RLWORKBENCH_CACHE"): load_policy(replace(MINI, stages=(Stage(10_000, 1e-2),)))
    assert time.time() - start < 5

def test_full_disk_names_the_setting_and_leaves_nothing(cache):
    # no file of this process may pass 20 kB: the weights (60 kB) do not fit
    code = ("import resource, signal; from tests.test_policies import MINI; from rlworkbench.policies import load_policy; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); load_policy(MINI)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.returncode == 1 and "RLWORKBENCH_CACHE" in run.stderr.splitlines()[-1], run.stderr[-500:]
    assert [p for p in (cache/"policies").iterdir() if p.is_dir()] == []
    assert load_policy(MINI, device="cpu").recipe == MINI

@pytest.mark.parametrize("when", ["training", "writing"])
def test_a_killed_training_leaves_nothing_damaged(cache, when):
    code = ("import os, sys, time; import rlworkbench.policies as ps; from tests.test_policies import MINI\n"
            + ("real = ps.Policy.save\ndef save(self, folder): real(self, folder); print('now', flush=True); time.sleep(60)\nps.Policy.save = save\n" if when == "writing" else
               "real = ps.sft\ndef sft(*a, **k): print('now', flush=True); time.sleep(60)\nps.sft = sft\n")
            + "ps.load_policy(MINI)")
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[1])
    assert run.stdout.readline() == "now\n"
    run.send_signal(signal.SIGKILL); run.wait()
    assert not (cache/"policies"/MINI.key()).exists()
    policy = load_policy(MINI, device="cpu")     # no lock is left behind either
    assert same(policy, train_recipe(MINI, False))
    assert [p.name for p in (cache/"policies").iterdir() if p.is_dir()] == [MINI.key()]   # what the dead process wrote is gone

def test_two_processes_train_once(cache):
    code = "from tests.test_policies import MINI; import rlworkbench.policies as ps; real = ps.train_recipe\ndef train(r): print('trained'); return real(r)\nps.train_recipe = train; ps.load_policy(MINI)"
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) for _ in range(2)]
    out = [r.communicate(timeout=120) for r in runs]
    assert [r.returncode for r in runs] == [0, 0], out
    assert sum(o.count("trained") for o, _ in out) == 1

def test_tokenizer_is_lossless_over_every_style(cache):
    policy = load_policy("chain-habits", device="cpu")
    world, rng = make_world("chain", steps=(3, 8), slip=.3), random.Random(0)
    for style in world.styles:
        for _ in range(20):
            p = world.problem(rng); text = world.demonstration(p, rng, style)
            ids = policy.tokenizer(text, add_special_tokens=False).input_ids
            assert len(ids) == len(text) and policy.decode(ids) == text
            assert policy.decode(policy.encode(p.prompt)) == p.prompt

def test_chat_prompt_equals_text_prompt_for_tiny_policies(cache):
    policy = load_policy("chain-habits", device="cpu")
    assert policy.encode([dict(role="user", content="12+5=")]) == policy.encode("12+5=") == [1, 4, 5, 13, 8, 15]

def test_r5_an_assistant_prefix_is_continued(cache):
    tokenizer = build_tokenizer(sorted(set("Step 1: 3+4=7\nWhat?")), context=64)
    with seeded(0): policy = Policy(tiny_model(len(tokenizer), 32, 1, context=64), tokenizer, "r5")
    prefix = "Step 1: 3+4=7\n\n"
    ids = policy.encode([dict(role="user", content="What?"), dict(role="assistant", content=prefix)])
    assert ids[-len(prefix):] == tokenizer(prefix, add_special_tokens=False).input_ids and tokenizer.eos_token_id not in ids
    assert policy.decode(ids) == "What?" + prefix

def test_r8_a_prompt_longer_than_the_context_is_refused(cache):
    tokenizer = build_tokenizer(list("ab"), context=64)
    policy = Policy(tiny_model(5, 32, 1, context=64), tokenizer, "short")
    assert len(policy.encode("a"*63)) == 64
    with pytest.raises(ValueError, match="context=64"): policy.encode("a"*100)
    with pytest.raises(ValueError, match="max_new_tokens=8"): policy.encode("a"*60, max_new_tokens=8)

def test_an_ordinary_folder_opens_with_plain_transformers_and_by_load_policy(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = shipped_dir()/"chain-habits"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    policy = load_policy(str(folder), device="cpu")
    assert same(policy, Policy(model, tokenizer, "")) and policy.recipe is None
    assert tokenizer("12+5=").input_ids == [1, 4, 5, 13, 8, 15]
    assert model.dtype == torch.float32 and load_policy(folder, device="cpu", dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert load_policy("chain-habits", device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16

def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="chain-habits"): load_policy("chain_habits")
    with pytest.raises(FileNotFoundError, match="config.json"): load_policy(tmp_path)
    with pytest.raises(ValueError, match="no recipe"): load_policy(tmp_path, rebuild=True)
    code = "from rlworkbench.policies import load_policy; load_policy('nobody/nothing-here')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert "the hub does not give it" in run.stderr.splitlines()[-1]

def test_lora_trains_the_adapter_alone_and_its_reference_is_the_start(tmp_path):
    base, policy = load_policy("chain-habits", device="cpu"), load_policy("chain-habits", lora=8, device="cpu")
    ids = torch.tensor([policy.encode("12+5-3=")])
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained)
    assert {n.split(".")[-4] for n in trained} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    policy.model(ids).logits.logsumexp(-1).sum().backward()
    torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad], lr=.1).step()
    with torch.no_grad():
        want = base.model(ids).logits
        with policy.reference() as reference: assert torch.allclose(reference(ids).logits, want, atol=1e-6)
        assert not torch.allclose(policy.model(ids).logits, want, atol=1e-3)
        policy.save(tmp_path/"adapter")
        assert json.loads((tmp_path/"adapter"/"adapter_config.json").read_text())["base_model_name_or_path"] == "chain-habits"
        back = load_policy(tmp_path/"adapter", device="cpu")
        assert torch.allclose(back.model(ids).logits, policy.model(ids).logits, atol=1e-5) and back.n_trained == policy.n_trained
    with pytest.raises(ValueError, match="adapter already"): load_policy(tmp_path/"adapter", lora=4, device="cpu")
    with pytest.raises(ValueError, match="lora=0"): load_policy("chain-habits", lora=0)
