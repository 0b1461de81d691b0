"Experiments: equal budgets, stored runs, resume after a kill, gates, verdicts from figures."
import json, math, os, signal, subprocess, sys, textwrap, time
import jsonschema, numpy as np, pytest, torch
from pathlib import Path
import rlworkbench
from rlworkbench.experiment import Evaluation, Experiment, Gate, claim, describe, evaluate, module_hash, print_gates, start_gate, writable_folder
from rlworkbench.method import Compose, Method
from rlworkbench.policies import load_policy
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
        kill = int(sys.argv[2])
        plain = _Watch.on_step_end
        def watched(self, args, state, control, **kw):
            plain(self, args, state, control, **kw)
            if state.global_step == kill: os.kill(os.getpid(), signal.SIGKILL)
        _Watch.on_step_end = watched
        settings = {ascii({**SMALL, "rollout_batches": 6})}
        e = Experiment("99_c", Chain(steps=3), "chain-habits", {{"ESPO": lambda: Compose(PPO(), ESPO())}}, [0], out=sys.argv[1], **settings)
        r = e.run()
    """)
    def run(out, kill=0): return subprocess.run([sys.executable, "-c", script, str(out), str(kill)], capture_output=True, text=True, timeout=240)
    whole = run(tmp_path/"whole")
    assert whole.returncode == 0, whole.stderr[-2000:]
    broken = run(tmp_path/"cut", kill=10)                          # after batch 5 of 6; checkpoints after 2 and 4
    assert broken.returncode == -signal.SIGKILL
    again = run(tmp_path/"cut")
    assert again.returncode == 0 and "resumes after batch 4" in again.stderr, again.stderr[-2000:]
    from safetensors.torch import load_file
    a, b = (load_file(tmp_path/name/"99_c"/"ESPO-0"/"policy"/"model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    x, y = (json.loads((tmp_path/name/"99_c"/"ESPO-0"/"run.json").read_text()) for name in ("whole", "cut"))
    assert x["evals"] == y["evals"] and x["n_sampled"] == y["n_sampled"]
    clock = ("step_time", "train_runtime")
    assert [{k: v for k, v in e.items() if k not in clock} for e in x["log"]] == [{k: v for k, v in e.items() if k not in clock} for e in y["log"]]

def test_evaluation_leaves_the_generator_of_the_run(tmp_path):
    policy = load_policy("chain-habits")
    torch.manual_seed(5); first = torch.rand(3)
    torch.manual_seed(5); a = evaluate(policy, WORLD, WORLD.problems(4, split="test"), samples=2, max_completion_length=40)
    assert torch.equal(torch.rand(3), first)
    b = evaluate(policy, WORLD, WORLD.problems(4, split="test"), samples=2, max_completion_length=40)
    assert a.completions == b.completions

def test_v8_unscorable_answers_are_left_out_of_numerator_and_denominator():
    e = Evaluation(np.array([[1, math.nan], [0, 0], [math.nan, math.nan]]), np.ones((3, 2)), [], 0.)
    assert e.accuracy == .5                                        # (1 + 0)/2: the third problem cannot be judged

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

def test_arms_are_told_apart_by_their_settings():
    assert describe(Compose(PPO(lam=.9))) != describe(Compose(PPO(lam=.95)))
    assert describe(PPO(steps=(1, 1))) != describe(PPO())
    assert describe(Method()) == {"name": "GRPO"}

def test_the_module_hash_sees_code_and_not_comments(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path/"some_module.py"
    file.write_text("# one\nx = 1\n"); first = module_hash("some_module")
    file.write_text("# two\n\nx = 1\n"); assert module_hash("some_module") == first
    file.write_text("x = 2\n"); assert module_hash("some_module") != first
