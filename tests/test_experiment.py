"Experiments: equal budgets, stored runs, resume after a kill, gates, verdicts from figures."
import json, math, signal, subprocess, sys, textwrap, warnings
import jsonschema, numpy as np, pytest, torch
from pathlib import Path
import rlworkbench
from rlworkbench.experiment import Evaluation, Experiment, Gate, claim, describe, evaluate, module_hash, print_gates, start_gate, writable_folder
from rlworkbench.method import Compose, Method
from rlworkbench.policies import RECIPES, load_policy
from rlworkbench.stats import Interval
from rlworkbench.toolbox.critics import PPO
from rlworkbench.worlds.chain import Chain

WORLD = Chain(steps=3)
SMALL = dict(rollout_batches=4, num_problems=2, num_generations=4, max_completion_length=40, eval_problems=8, eval_samples=2, eval_every=2)

class Nothing(Method): "An arm that is GRPO under another name."

@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method, "twin": Nothing, "PPO": PPO}, [0, 1], out=tmp_path_factory.mktemp("out"), **SMALL).run()

def test_equal_arms_give_equal_results_whatever_ran_before(results):
    assert np.array_equal(results.final("GRPO"), results.final("twin"))
    assert results.tokens("GRPO").tolist() == results.tokens("twin").tolist()
    i = results.compare("twin")
    assert (i.mean, i.low, i.high) == (0, 0, 0)

def test_arms_have_equal_budgets_and_seeds_differ(results):
    assert {r["updates"] for r in results.of("GRPO")} == {4} and {r["updates"] for r in results.of("PPO")} == {8}   # two passes over each batch
    a, b = results.tokens("GRPO")
    assert a != b
    assert results.series("PPO", "value_loss")[0].tolist() == [1, 2, 3, 4]

def test_the_table_holds_every_evaluation(results):
    t = results.table
    accuracy = t[t.metric == "accuracy"]
    assert len(accuracy) == 3*2*3 and sorted(accuracy.batch.unique()) == [0, 2, 4]
    start = accuracy[accuracy.batch == 0].value.unique()
    assert len(start) == 1                                        # one start for all arms and seeds
    assert results.summary().loc["GRPO", "tokens / baseline"] == 1

def test_the_record_follows_the_schema(results):
    gates = [*start_gate(results.experiment.start()), results.learning_gate()]
    record = results.record(paper="none", scale="smoke", gates=gates, claims=[claim("a", "b", ">= 0", results.compare("twin"), gates)])
    schema = json.loads((Path(rlworkbench.__file__).parent/"data"/"results.schema.json").read_text())
    jsonschema.validate(record, schema)
    json.dumps(record, allow_nan=False)

def test_a_stored_run_is_not_run_again_and_other_settings_are(results, tmp_path):
    make = lambda **kw: Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, **{**SMALL, **kw})
    make().run()
    file = tmp_path/"99_c"/"GRPO-0"/"run.json"
    first = file.stat().st_mtime_ns
    make().run(); assert file.stat().st_mtime_ns == first
    make(learning_rate=2e-4).run(); assert file.stat().st_mtime_ns != first
    make().run(); assert file.stat().st_mtime_ns == first          # the first run was put aside, not lost
    assert len(list((tmp_path/"99_c").iterdir())) == 2

def test_a_token_budget_ends_the_run(tmp_path):
    r = Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, **{**SMALL, "budget": ("tokens", 250)}).run()
    run = r.of("GRPO")[0]
    assert 250 <= run["n_sampled"] < 600 and run["updates"] < 4 and run["evals"][-1]["tokens"] == run["n_sampled"]

def test_n5_a_killed_run_continues_and_ends_as_an_unbroken_one(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal, sys
        from rlworkbench.experiment import Experiment, _Watch
        from rlworkbench.method import Compose
        from rlworkbench.methods.espo import ESPO
        from rlworkbench.toolbox.critics import PPO
        from rlworkbench.worlds.chain import Chain
        out, kill = sys.argv[1:3]; kill = int(kill)
        plain = _Watch.on_step_end
        def watched(self, args, state, control, **kw):
            plain(self, args, state, control, **kw)
            if state.global_step == kill: os.kill(os.getpid(), signal.SIGKILL)
        _Watch.on_step_end = watched
        settings = {ascii({**SMALL, "rollout_batches": 30, "eval_every": 10})}
        e = Experiment("99_c", Chain(steps=3), "chain-habits", {{"ESPO": lambda: Compose(PPO(), ESPO())}}, [0], out=out, **settings)
        r = e.run()
    """)
    def run(out, kill=0): return subprocess.run([sys.executable, "-c", script, str(out), str(kill)], capture_output=True, text=True, timeout=240)
    whole = run(tmp_path/"whole")                                  # 30 batches, two updates on each: 60
    assert whole.returncode == 0, whole.stderr[-2000:]
    broken = run(tmp_path/"cut", kill=45)                          # checkpoints after updates 20 and 40
    assert broken.returncode == -signal.SIGKILL
    again = run(tmp_path/"cut")
    assert again.returncode == 0 and "resumes after batch 20" in again.stderr, again.stderr[-2000:]
    from safetensors.torch import load_file
    a, b = (load_file(tmp_path/name/"99_c"/"ESPO-0"/"policy"/"model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    x, y = (json.loads((tmp_path/name/"99_c"/"ESPO-0"/"run.json").read_text()) for name in ("whole", "cut"))
    assert x["evals"] == y["evals"] and x["n_sampled"] == y["n_sampled"] and x["updates"] == y["updates"] == 60
    assert [e["step"] for e in y["log"]] == list(range(1, 61))
    clock = ("step_time", "train_runtime")
    assert [{k: v for k, v in e.items() if k not in clock} for e in x["log"]] == [{k: v for k, v in e.items() if k not in clock} for e in y["log"]]

def test_evaluation_leaves_the_generator_of_the_run(tmp_path):
    policy = load_policy("chain-habits")
    torch.manual_seed(5); first = torch.rand(3)
    torch.manual_seed(5); a = evaluate(policy, WORLD, WORLD.problems(4, split="test"), samples=2, max_completion_length=40)
    assert torch.equal(torch.rand(3), first)
    b = evaluate(policy, WORLD, WORLD.problems(4, split="test"), samples=2, max_completion_length=40)
    assert a.completions == b.completions
    import random
    class Rolls(Chain):                                            # a judge that draws, too
        def verify(self, problem, text): return float(random.random() < .5 + 0*np.random.rand())
    random.seed(1); first = random.random(); random.seed(1); np.random.seed(1); state = np.random.get_state()[1].copy()
    c, d = (evaluate(policy, Rolls(steps=3), WORLD.problems(4, split="test"), samples=2, max_completion_length=40) for _ in range(2))
    assert np.array_equal(c.correct, d.correct) and random.random() == first and np.array_equal(np.random.get_state()[1], state)

def test_r8_evaluation_counts_prompts_that_do_not_fit():
    policy = load_policy("chain-habits")
    with pytest.warns(UserWarning, match="4 of 4 prompts lost their beginning: with max_completion_length=250 .* context of 256"):
        evaluate(policy, WORLD, WORLD.problems(4, split="test"), samples=1, max_completion_length=250)
    with warnings.catch_warnings():
        warnings.simplefilter("error"); evaluate(policy, WORLD, WORLD.problems(2, split="test"), samples=1, max_completion_length=40)

def test_v8_unscorable_answers_are_left_out_of_numerator_and_denominator():
    e = Evaluation(np.array([[1, math.nan], [0, 0], [math.nan, math.nan]]), np.ones((3, 2)), [], 0.)
    assert e.accuracy == .5                                        # (1 + 0)/2: the third problem cannot be judged

def test_v8_a_test_problem_that_cannot_be_judged_is_stored_as_missing(tmp_path):
    class Unreadable(Chain):
        def verify(self, problem, text): return None if problem.prompt == self.unread else super().verify(problem, text)
    world = Unreadable(steps=3)
    world.unread = world.problems(8, seed=0, split="test")[0].prompt
    make = lambda: Experiment("99_c", world, "chain-habits", {"GRPO": Method, "twin": Nothing}, [0], out=tmp_path, **SMALL).run()
    for results in (make(), make()):                               # run, then read from the store
        final = results.final("GRPO")
        assert np.isnan(final[0, 0]) and not np.isnan(final[0, 1:]).any()
        assert results.compare("twin").n_problems == 7 and results.of("GRPO")[0]["evals"][-1]["per_problem"][0] is None
        assert results.series("GRPO", "accuracy")[1][0, -1] == pytest.approx(np.nanmean(final))
    e = Evaluation(np.array([[1, 0.], [0, 0], [math.nan, math.nan]]), np.ones((3, 2)), [], 0.)
    assert e.mixed_frac == .5                                      # one of the two that could be judged

def test_v15_partial_credit_is_not_accuracy():
    e = Evaluation(np.array([[.01, .05, .125, .4, 1.]]), np.ones((1, 5)), [], 0.)
    assert e.accuracy == .2

def test_a_failed_gate_leaves_no_verdict(capsys):
    gates = [Gate("start accuracy", .001, "0.05 to 0.50", False)]
    assert claim("c", "s", ">= 0", Interval(1., .9, 1.1, n_seeds=3), gates)["verdict"] == "gate not met"
    assert claim("c", "s", ">= 0", Interval(1., .9, 1.1, n_seeds=3))["verdict"] == "holds"
    assert claim("c", "s", ">= 0", Interval(0., -.1, .1, n_seeds=3))["verdict"] == "undecided"
    assert claim("c", "s", ">= 0", Interval(-1., -1.1, -.9, n_seeds=3))["verdict"] == "does not hold here"
    assert not print_gates(gates) and "cannot carry a verdict" in capsys.readouterr().out

def test_a_folder_that_cannot_be_written_is_named_before_any_work(tmp_path):
    (tmp_path/"file").touch()
    with pytest.raises(OSError, match="choose another folder for `out`"):
        Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path/"file"/"deep", **SMALL)

def test_empty_arms_and_seeds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="arms"): Experiment("99_c", WORLD, "chain-habits", {}, [0], out=tmp_path)
    with pytest.raises(ValueError, match="seeds"): Experiment("99_c", WORLD, "chain-habits", {"a": Method}, [], out=tmp_path)
    with pytest.raises(ValueError, match="names one twice"): Experiment("99_c", WORLD, "chain-habits", {"a": Method}, [1, 1], out=tmp_path)
    with pytest.raises(ValueError, match="make the same folder"): Experiment("99_c", WORLD, "chain-habits", {"a b": Method, "a/b": Method}, [1], out=tmp_path)

@pytest.mark.parametrize("changes, words", [
    (dict(num_generations=1), "at least 2"), (dict(eval_every=0), "eval_every=0"), (dict(rollout_batches=0), "rollout_batches=0"),
    (dict(budget=("token", 100)), "give \\('tokens', n\\)"), (dict(budget=("rollouts", 33)), "num_generations = 32"), (dict(settings=dict(learning_rate=1.)), "learning_rate.*its argument"),
    (dict(settings=dict(num_iterations=3)), "PPO needs num_iterations=2, but the experiment has settings=.'num_iterations': 3"),
    (dict(settings=dict(per_device_train_batch_size=4)), "per_device_train_batch_size=4 in 1 slices"), (dict(settings=dict(gradient_accumulation_steps=3)), "in 3 slices"),
    (dict(settings=dict(steps_per_generation=2, gradient_accumulation_steps=8)), "gradient_accumulation_steps=8 does not divide the 2 slices")])
def test_settings_that_contradict_are_refused_before_anything_runs(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words): Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method, "PPO": PPO}, [0], out=tmp_path, **{**SMALL, **changes}).run()
    assert not list(tmp_path.glob("99_c/*"))

def test_slices_leave_the_budget_as_it_is(tmp_path):
    "Eight rollouts a batch, in two slices of four; once as one update, once as two."
    for settings, updates in ((dict(gradient_accumulation_steps=2), 4), (dict(steps_per_generation=2, gradient_accumulation_steps=1), 8)):
        run = Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, settings=settings, **SMALL).run().of("GRPO")[0]
        assert run["updates"] == updates and [e["batch"] for e in run["evals"]] == [0, 2, 4]

def test_a_token_budget_that_is_not_reached_is_said(tmp_path):
    with pytest.warns(UserWarning, match="of budget=.'tokens', 1000000.: it ended with rollout_batches=4"):
        Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, **{**SMALL, "budget": ("tokens", 10**6)}).run()

def test_an_experiment_refuses_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2"): Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, **SMALL).run()

def test_recipes_are_told_apart(tmp_path):
    from dataclasses import replace
    recipe = RECIPES["chain-habits"]
    names = [Experiment("99_c", WORLD, r, {"GRPO": Method}, [0], out=tmp_path, **SMALL)._policy_name("GRPO") for r in (recipe, replace(recipe, seed=recipe.seed + 1), "chain-habits")]
    assert len(set(names)) == 3 and names[2] == "chain-habits"

def test_an_arm_may_have_its_own_policy_world_and_group_size(tmp_path):
    class Twelve(Method): training = {"num_generations": 6}
    other = lambda: load_policy("gym-chain_sum")
    with pytest.raises(ValueError, match="policies names GRPQ, which is no arm"): Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], policies={"GRPQ": other}, out=tmp_path, **SMALL)
    arms = {"GRPO": Method, "six": Twelve, "longer": Nothing}
    e = Experiment("99_c", WORLD, "chain-habits", arms, [0], worlds={"longer": Chain(steps=5)}, out=tmp_path, **SMALL)
    with pytest.raises(ValueError, match=r"Twelve needs num_generations=6, the other arms have 4.*budget=\('tokens', n\)"): e.run()
    r = Experiment("99_c", WORLD, "chain-habits", arms, [0], worlds={"longer": Chain(steps=5)}, out=tmp_path, **{**SMALL, "budget": ("tokens", 700)}).run()
    assert r.of("GRPO")[0]["n_sampled"] >= 700 and len(r.experiment.tests("longer")[0].prompt) > len(r.experiment.tests("six")[0].prompt)
    assert r.of("longer")[0]["evals"][0]["accuracy"] != r.of("GRPO")[0]["evals"][0]["accuracy"]     # each arm starts from its own
    assert r.of("six")[0]["evals"][0] == r.of("GRPO")[0]["evals"][0]

def test_arms_are_told_apart_by_their_settings():
    def sure(x): return x
    def unsure(x): return -x
    class Judged(Method):
        def __init__(self, judge, dials): self.judge, self.dials, self._cache, self.log = judge, dials, object(), {"a": len(dials)}
    assert len({str(describe(Judged(j, kw))) for j in (sure, unsure) for kw in ({}, {"a": 1}, {"a": torch.tensor([1.])}, {"a": torch.tensor([2.])})}) == 8
    assert describe(Judged(sure, {"a": 1})) == describe(Judged(sure, {"a": 1})) and "log" not in describe(Judged(sure, {"a": 1}))
    assert describe(Compose(PPO(lam=.9))) != describe(Compose(PPO(lam=.95)))
    assert describe(PPO(steps=(1, 1))) != describe(PPO())
    assert describe(Method()) == {"name": "GRPO"}

def test_the_module_hash_sees_code_and_not_comments(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path/"some_module.py"
    file.write_text("# one\nx = 1\n"); first = module_hash("some_module")
    file.write_text("# two\n\nx = 1\n"); assert module_hash("some_module") == first
    file.write_text("x = 2\n"); assert module_hash("some_module") != first

def test_two_processes_in_one_folder_wait_for_each_other_and_keep_their_results_apart(tmp_path):
    script = textwrap.dedent(f"""
        import json, sys
        from rlworkbench.experiment import Experiment
        from rlworkbench.method import Method
        from rlworkbench.worlds.chain import Chain
        r = Experiment("99_c", Chain(steps=3), "chain-habits", {{"GRPO": Method}}, [0], out=sys.argv[1], learning_rate=float(sys.argv[2]), **{SMALL!r}).run()
        print(json.dumps([r.of("GRPO")[0]["identity"]["learning_rate"], r.of("GRPO")[0]["n_sampled"]]))
    """)
    jobs = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), rate], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rate in ("1e-4", "2e-3")]
    outs = [job.communicate(timeout=240) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outs
    assert [json.loads(out)[0] for out, _ in outs] == [1e-4, 2e-3]
    assert len(list((tmp_path/"99_c").glob("GRPO-0*/run.json"))) == 2                    # one of them was put aside, none is lost

def test_a_folder_that_is_not_a_run_is_put_aside_and_not_deleted(tmp_path):
    mine = tmp_path/"99_c"/"GRPO-0"; mine.mkdir(parents=True); (mine/"notes.txt").write_text("mine")
    Experiment("99_c", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, **SMALL).run()
    assert [p.read_text() for p in (tmp_path/"99_c").glob("GRPO-0@unknown-*/notes.txt")] == ["mine"]

def test_a_chapter_cannot_leave_its_folder(tmp_path):
    with pytest.raises(ValueError, match="separators"): Experiment("../evil", WORLD, "chain-habits", {"GRPO": Method}, [0], out=tmp_path, **SMALL)
