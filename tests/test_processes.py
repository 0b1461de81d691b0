"Two real processes over gloo."
import json, subprocess, sys
from pathlib import Path
import torch
from rlworkbench.policies import build_tokenizer, tiny_model
from rlworkbench.worlds.chain import Chain

def launch(tmp_path, mode):
    torch.manual_seed(0)
    tokenizer = build_tokenizer(list(Chain().vocab), "t", 64)
    tiny_model(len(tokenizer), width=32, layers=1, context=64).save_pretrained(tmp_path/"policy"); tokenizer.save_pretrained(tmp_path/"policy")
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(Path(__file__).parent/"two_processes.py"),
                          str(tmp_path/"policy"), str(tmp_path/"out"), mode], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]

def test_t4_a_group_spread_over_two_processes_has_one_baseline(tmp_path):
    launch(tmp_path, "spread")
    a, b = (json.loads(Path(f"{tmp_path/'out'}-{rank}.json").read_text()) for rank in (0, 1))
    std = (((1 - 2/3)**2*4 + (2/3)**2*2)/5)**.5                # sample deviation of 1,0,0,1,1,1; mean 0.6667
    want = [x/(std + 1e-4) for x in (1/3, -2/3, -2/3, 1/3, 1/3, 1/3)]
    assert all(abs(x - y) < 1e-5 for x, y in zip(a["advantages"] + b["advantages"], want))
    assert a["completions"] != b["completions"]               # the ranks draw for themselves
    assert a["weights"] == b["weights"]                       # and make one update together
    assert a["devices"] <= 1 and b["devices"] <= 1

def test_t1_two_processes_resume_each_with_their_own_rollouts(tmp_path):
    launch(tmp_path, "resume")
    a, b = (json.loads(Path(f"{tmp_path/'out'}-{rank}.json").read_text()) for rank in (0, 1))
    assert {p.name for p in (tmp_path/"out"/"checkpoint-3").glob("*workbench.pt")} == {"workbench.pt", "1-workbench.pt"}
    assert a["completions"] != b["completions"] and a["same"] and b["same"]
    assert a["weights"] == a["again"] == b["weights"] == b["again"]
    assert a["n_sampled"] == b["n_sampled"] and a["n_sampled"][0] == a["n_sampled"][1] > a["n_own"] + b["n_own"]     # tokens of both, two batches

def test_a_method_that_sees_groups_refuses_to_have_them_spread(tmp_path):
    launch(tmp_path, "refuse")
    errors = [json.loads(Path(f"{tmp_path/'out'}-{rank}.json").read_text())["error"] for rank in (0, 1)]
    assert all("set per_device_train_batch_size" in e and "groups of num_generations=6" in e for e in errors)
