"The `rlw` command on small notebooks: what it refuses, what it keeps, and where it puts things."
import json, os, pty, re, signal, subprocess, sys, time
from pathlib import Path

import nbformat
import pytest

PARAMETERS = "#parameters\nscale = 'cpu'\nseed = 0\nmodel = None\nout = 'runs'"
RLW = [sys.executable, "-P", "-c", "from rlworkbench.jobs import main; main()"]

def rlw(*words, cwd, timeout=120, env=None):
    return subprocess.run([*RLW, *map(str, words)], cwd=cwd, env=os.environ | (env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=timeout)

def texts(path):
    "What the cells of an executed notebook printed."
    return "".join(o.get("text", "") for c in nbformat.read(path, 4).cells for o in c.get("outputs", []))

def pieces(path, key="status"): return [c.metadata["papermill"].get(key) for c in nbformat.read(path, 4).cells if "papermill" in c.metadata]

# ---- names and listing

def test_list_is_quick_and_complete(root):
    began = time.monotonic()
    found = rlw("list", cwd=root)
    seconds = time.monotonic() - began
    lines = found.stdout.splitlines()
    assert found.returncode == 0 and len(lines) == 34 and [int(l[:2]) for l in lines] == list(range(34))
    best = min([seconds] + [_timed(lambda: rlw("list", cwd=root)) for _ in range(3)])   # the machine may be busy: the best of four
    assert best < 0.5, f"rlw list took {best:.2f} s"

def _timed(f):
    began = time.monotonic(); f()
    return time.monotonic() - began

def test_list_imports_nothing_heavy(root):
    code = "import sys, rlworkbench.jobs; print([m for m in ('torch', 'transformers', 'papermill', 'nbformat', 'numpy', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout.strip() == "[]"

def test_unknown_notebook_is_named_with_near_ones(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS)
    r = rlw("run", "esop", cwd=checkout)
    assert r.returncode == 2 and "no notebook is called 'esop'; there is: espo" in r.stdout

def test_list_works_anywhere(tmp_path):
    r = rlw("list", cwd=tmp_path)     # falls back to the checkout that the package lies in
    assert r.returncode == 0

# ---- N1, N2: parameters

@pytest.mark.parametrize("cells, known", [([PARAMETERS, "open('started', 'w')"], "it has: scale, seed, model, out"), (["open('started', 'w')"], "it has no parameters at all")])
def test_n1_unknown_parameter_is_refused_before_the_kernel(checkout, make_notebook, cells, known):
    make_notebook("07_espo", *cells)
    r = rlw("run", "espo", "-p", "lrr", "1e-5", cwd=checkout)
    assert r.returncode != 0 and f"07_espo has no parameter 'lrr'; {known}" in r.stdout
    assert not list(checkout.rglob("started")) and not (checkout / "runs").exists()

def test_n1_scale_for_a_notebook_without_parameters(checkout, make_notebook):
    make_notebook("spans", "1")
    r = rlw("run", "spans", "--scale", "smoke", cwd=checkout)
    assert r.returncode != 0 and "no parameter 'scale'" in r.stdout

VALUES = {"none": None, "true": True, "inf": float("inf"), "nan": float("nan"), "tiny": 1e-300, "nested": {"a": {"b": None}, "c": [1, 2.5]},
          "path": r"C:\x", "quoted": 'say "hi" it\'s\nnew', "pair": (1, 2)}

def check_values(path):
    got = eval(texts(path).strip().splitlines()[-1], {"nan": float("nan"), "inf": float("inf")})
    for (name, want), value in zip(VALUES.items(), got):
        assert type(value) is type(want) and (value == want or value != value and want != want), (name, value)

SHOW = "print([" + ", ".join(f"p_{k}" for k in VALUES) + "])"

def test_n2_values_from_python(checkout, make_notebook):
    from rlworkbench.jobs import Job, run_job
    path = make_notebook("00_made", "#parameters\n" + "\n".join(f"p_{k} = 0" for k in VALUES), SHOW)
    job = Job(path, checkout, {f"p_{k}": v for k, v in VALUES.items()}, checkout / "there")
    assert run_job(job).ok
    check_values(job.copy)
    json.loads(job.copy.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))   # a front end can read it

def test_n2_values_from_the_command_line(checkout, make_notebook):
    make_notebook("00_made", "#parameters\n" + "\n".join(f"p_{k} = 0" for k in VALUES), SHOW)
    words = [w for k, v in VALUES.items() for w in (["-r", f"p_{k}", v] if k == "quoted" else ["-p", f"p_{k}", v if isinstance(v, str) else repr(v)])]
    r = rlw("run", "0", *words, "--out", "there", cwd=checkout)
    assert r.returncode == 0, r.stdout
    check_values(checkout / "there/00_made.ipynb")

# ---- N3, N7: interpreter and package

def test_n3_the_job_runs_in_the_interpreter_that_started_it(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "import sys\nprint('in', sys.executable)", kernel="my-old-env")
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 0, r.stdout
    assert f"python    {sys.executable}" in r.stdout and f"in {sys.executable}" in r.stdout

def test_n7_the_package_copy_is_shown(root, tmp_path):
    out = tmp_path / "o"
    make = root / "nbs"     # a notebook of the project itself, if there is one that is quick
    r = rlw("run", make / "core/notebooks.ipynb", "--out", out, cwd=tmp_path)
    assert r.returncode == 0, r.stdout
    assert f"package   {root / 'rlworkbench/__init__.py'}" in r.stdout and "warning" not in r.stdout

def test_n7_another_copy_is_warned_of(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "1")
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 0 and "warning   this package is not the project's" in r.stdout and str(checkout) in r.stdout

# ---- N4: failures

@pytest.mark.parametrize("bad, error", [("1/0", "ZeroDivisionError: division by zero"), ("%run missing.py", "missing.py"), ("%nosuchmagic", "")])
def test_n4_failed_cell(checkout, make_notebook, bad, error):
    make_notebook("07_espo", PARAMETERS, "!# The question", "print('before')", bad, "print('af' + 'ter')", "1")
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 1, r.stdout
    assert re.search(r"failed in cell 5 of 7 \(In \[4\]\)", r.stdout) and error in r.stdout and "after" not in r.stdout   # the injected cell counts
    copy = next((checkout / "runs").rglob("07_espo.ipynb"))
    assert str(copy.relative_to(checkout)) in r.stdout and "2 later cells not run" in r.stdout
    assert pieces(copy) == ["completed"] * 4 + ["failed", "not run", "not run"] and "before" in texts(copy)

def test_n4_error_caught_by_a_custom_handler(checkout, make_notebook):
    handler = "def quiet(shell, *error, tb_offset=None): print('caught')\nget_ipython().set_custom_exc((ValueError,), quiet)"
    make_notebook("07_espo", PARAMETERS, handler, "raise ValueError('x')", "print('the la' + 'st')")
    r = rlw("run", "espo", cwd=checkout)
    assert "caught" in r.stdout and (r.returncode == 0) == ("the last" in r.stdout), r.stdout   # all cells, or a failed job

def test_n4_a_dead_kernel_is_said_so(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "print('before', flush=True)", "import os, time\ntime.sleep(.5)\nos._exit(9)", "1")
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 1 and "the kernel died in cell 4 of 5" in r.stdout and "Traceback" not in r.stdout, r.stdout
    assert "before" in texts(next((checkout / "runs").rglob("07_espo.ipynb")))

@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_keeps_its_notebook_and_leaves_no_kernel(checkout, make_notebook, sent):
    make_notebook("07_espo", PARAMETERS, "import os\nprint('kernel', os.getpid(), flush=True)", "import time\ntime.sleep(100)", "1")
    child = subprocess.Popen([*RLW, "run", "espo"], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = ""
    for line in child.stdout:
        said += line
        if "kernel" in line: break
    time.sleep(1)
    child.send_signal(sent)
    said += child.stdout.read()
    assert child.wait(60) == 130 and "interrupted in cell 4 of 5" in said, said
    copy = next((checkout / "runs").rglob("07_espo.ipynb"))
    assert pieces(copy)[-1] == "not run" and "kernel" in texts(copy)
    kernel = int(re.search(r"kernel (\d+)", said)[1])
    for _ in range(50):
        if not Path(f"/proc/{kernel}").exists(): break
        time.sleep(.1)
    else: pytest.fail("the kernel is still there")

def test_n5_a_rerun_keeps_the_earlier_copy_and_the_folder(checkout, make_notebook):
    step = "from pathlib import Path\nmark = Path(out) / 'done.txt'\nprint('resumed' if mark.exists() else 'first')\nif not mark.exists():\n    mark.write_text('1')\n    raise RuntimeError('killed')"
    make_notebook("07_espo", PARAMETERS, step)
    assert rlw("run", "espo", cwd=checkout).returncode == 1
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 0 and "resumed" in r.stdout and "an earlier, unfinished copy is now 07_espo.1.ipynb" in r.stdout, r.stdout
    assert "first" in texts(next((checkout / "runs").rglob("07_espo.1.ipynb")))

TRAINING = """from pathlib import Path
import os
from rlworkbench.experiment import Experiment
from rlworkbench.method import Method
from rlworkbench.worlds.base import make_world
class Watched(Method):
    name = 'GRPO'
    def after_update(self, run):
        with open(f'{out}/updates.txt', 'a') as f: f.write(f'{run.state.global_step} ')
        if run.state.global_step == kill and not Path(f'{out}/killed').exists():
            Path(f'{out}/killed').touch(); os._exit(9)
found = Experiment('07_espo', make_world('chain', steps=6), 'chain-habits', {'GRPO': Watched}, [seed], rollout_batches=12, num_problems=4, num_generations=4,
                   max_completion_length=64, eval_problems=16, eval_samples=2, eval_every=4, out=out).run()
print(found.final('GRPO').ravel().tolist(), found.tokens('GRPO').tolist())"""

@pytest.mark.timeout(600)
def test_n5_a_killed_training_goes_on_from_its_checkpoint(checkout, make_notebook):
    # 12 updates with a checkpoint every 4, killed at 9: the rerun does 9 to 12 and ends as an unbroken run does
    pytest.importorskip("rlworkbench.experiment")
    make_notebook("07_espo", "#parameters\nseed = 0\nout = 'runs'\nkill = 0", TRAINING)
    unbroken = rlw("run", "espo", "--out", "whole", cwd=checkout, timeout=300)
    assert unbroken.returncode == 0, unbroken.stdout
    first = rlw("run", "espo", "-p", "kill", "9", "--out", "broken", cwd=checkout, timeout=300)
    assert first.returncode == 1 and "the kernel died" in first.stdout, first.stdout
    second = rlw("run", "espo", "-p", "kill", "9", "--out", "broken", cwd=checkout, timeout=300)
    assert second.returncode == 0, second.stdout
    steps = [int(s) for s in (checkout / "broken/updates.txt").read_text().split()]
    assert steps == [*range(1, 10), *range(9, 13)]
    assert texts(checkout / "broken/07_espo.ipynb").splitlines()[-1] == texts(checkout / "whole/07_espo.ipynb").splitlines()[-1]
    assert (checkout / "broken/07_espo.1.ipynb").exists()          # the earlier output is kept

# ---- N6: paths

def test_n6_output_is_the_callers_and_the_notebooks_paths_are_its_own(checkout, make_notebook, tmp_path):
    make_notebook("07_espo", PARAMETERS, "open('beside.txt', 'w').close()\nimport os\nprint('out is', out)\nopen(os.path.join(out, 'figure.txt'), 'w').close()")
    caller = tmp_path / "un autre é {x}"; caller.mkdir()
    r = rlw("run", checkout / "nbs/07_espo.ipynb", "--out", "out.ipynb", cwd=caller)
    assert r.returncode == 0, r.stdout
    assert (caller / "out.ipynb").exists() and (caller / "out/figure.txt").exists() and (checkout / "nbs/beside.txt").exists()

def test_n6_working_directory(checkout, make_notebook, tmp_path):
    make_notebook("07_espo", PARAMETERS, "open('beside.txt', 'w').close()")
    (tmp_path / "w d").mkdir()
    r = rlw("run", "espo", "--cwd", tmp_path / "w d", "--out", "out.ipynb", cwd=checkout)
    assert r.returncode == 0 and (tmp_path / "w d/beside.txt").exists() and (checkout / "out.ipynb").exists(), r.stdout

def test_unwritable_output_names_the_option(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "1")
    (checkout / "file").touch()
    r = rlw("run", "espo", "--out", "file/there", cwd=checkout)
    assert r.returncode != 0 and "--out" in r.stdout and "Traceback" not in r.stdout

@pytest.mark.parametrize("output", [[], ["out put.ipynb"]])
def test_plain_papermill(checkout, make_notebook, tmp_path, output):
    # without an output path papermill writes the notebook to standard output (it refuses on a terminal)
    path = make_notebook("07_espo", PARAMETERS, "print('ran', scale, seed)")
    r = subprocess.run([sys.executable, "-m", "papermill", str(path), *output, "-p", "scale", "smoke", "-p", "seed", "3"], cwd=tmp_path, stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    done = nbformat.reads(r.stdout, 4) if not output else nbformat.read(tmp_path / output[0], 4)
    assert done.cells[-1].outputs[0].text == "ran smoke 3\n"

# ---- progress

BARS = "from tqdm.auto import tqdm\nimport sys, time\nfor i in tqdm(range(20), desc='PPO'): time.sleep(.02)\nfrom tqdm import tqdm as plain\nfor i in plain(range(20), desc='ESPO', file=sys.stderr): time.sleep(.02)\nprint('table')"

def test_progress_in_a_log(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "!## The experiment", BARS)
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 0 and "[ 3/4] The experiment" in r.stdout and "      table" in r.stdout, r.stdout
    assert re.search(r"PPO: 100%.*20/20", r.stdout) and re.search(r"ESPO: 100%.*20/20", r.stdout) and "\r" not in r.stdout
    assert len(re.findall("PPO: ", r.stdout)) <= 3        # a log is not flooded

def test_progress_on_a_terminal_is_one_line_in_place(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "!## The experiment", BARS)
    master, slave = pty.openpty()
    child = subprocess.Popen([*RLW, "run", "espo"], cwd=checkout, stdout=slave, stderr=slave, stdin=slave, close_fds=True)
    os.close(slave)
    said = b""
    while True:
        try: chunk = os.read(master, 65536)
        except OSError: break
        if not chunk: break
        said += chunk
    assert child.wait(60) == 0
    said = said.decode()
    assert len(re.findall(r"\r\x1b\[K.{0,20}PPO: ", said)) >= 3 and "done in" in said
    assert "done in" in said.split("\x1b[K")[-1]          # the line of state is gone at the end

def test_last_lines_name_notebook_and_results(checkout, make_notebook):
    (checkout / "results").mkdir()
    make_notebook("07_espo", PARAMETERS, "open('../results/07_espo.json', 'w').close()")
    r = rlw("run", "espo", cwd=checkout)
    assert "notebook runs/07_espo/cpu-seed0/07_espo.ipynb" in r.stdout and "results  results/07_espo.json" in r.stdout, r.stdout

# ---- sweeps

COUNTING = "from pathlib import Path\nlog = Path(out).parent / 'log.txt'\nlog.open('a').write(f'{seed} ')\nassert not (Path(out).parent / f'fail{seed}').exists()"

def test_sweep_goes_on_where_it_stopped(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, COUNTING)
    folder = checkout / "runs/07_espo"; folder.mkdir(parents=True)
    (folder / "fail1").touch()
    r = rlw("sweep", "07_espo", "--seeds", "0..2", cwd=checkout)
    assert r.returncode == 1 and (folder / "log.txt").read_text() == "0 1 2 ", r.stdout      # one failure stops no other
    (folder / "fail1").unlink()
    r = rlw("sweep", "07_espo", "--seeds", "0..2", cwd=checkout)
    assert r.returncode == 0 and (folder / "log.txt").read_text() == "0 1 2 1 ", r.stdout    # only what was missing
    assert r.stdout.count("finished before") >= 2 and (folder / "claim-seed1/07_espo.ipynb").exists()
    make_notebook("07_espo", PARAMETERS, COUNTING + "\n2")
    assert rlw("sweep", "07_espo", "--seeds", "0", cwd=checkout).returncode == 0             # other code: another run
    assert (folder / "log.txt").read_text() == "0 1 2 1 0 " and (folder / "claim-seed0.1").exists()

def test_sweep_side_by_side_shares_the_cores(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "import os, time\nprint('threads', os.environ['OMP_NUM_THREADS'])\ntime.sleep(2)")
    r = rlw("sweep", "espo", "--seeds", "0,1", "--jobs", "2", "--scale", "smoke", cwd=checkout, env={"OMP_NUM_THREADS": "7"})
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert r.returncode == 0, r.stdout
    for seed in 0, 1: assert f"smoke-seed{seed} |       threads {share}" in r.stdout
    begun = [json.loads((checkout / f"runs/07_espo/smoke-seed{s}/07_espo.ipynb").read_text())["metadata"]["papermill"] for s in (0, 1)]
    assert begun[0]["start_time"] < begun[1]["end_time"] and begun[1]["start_time"] < begun[0]["end_time"]

def test_interrupted_sweep_ends_its_jobs(checkout, make_notebook):
    make_notebook("07_espo", PARAMETERS, "import os, time\nprint('kernel', os.getpid(), flush=True)\ntime.sleep(100)")
    child = subprocess.Popen([*RLW, "sweep", "espo", "--seeds", "0..3", "--jobs", "2"], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kernels = []
    for line in child.stdout:
        if m := re.search(r"kernel (\d+)", line): kernels.append(int(m[1]))
        if len(kernels) == 2: break
    child.send_signal(signal.SIGTERM)
    child.stdout.read()
    assert child.wait(60) == 130
    time.sleep(1)
    assert not any(Path(f"/proc/{k}").exists() for k in kernels)
    assert sorted(p.name for p in (checkout / "runs/07_espo").iterdir()) == ["claim-seed0", "claim-seed1"]

# ---- refresh

def test_refresh_keeps_what_is_worth_keeping(checkout, make_notebook, root):
    noisy = BARS + "\nimport warnings, ipywidgets, matplotlib.pyplot as plt\nwarnings.warn('noise')\ndisplay(ipywidgets.IntSlider())\nprint('took 3.2 s')\nprint('wrote', out + '/07_espo.json')\nplt.plot([0, 1]); plt.show()"
    path = make_notebook("07_espo", PARAMETERS, "import os; os.environ['MPLBACKEND'] = 'module://matplotlib_inline.backend_inline'\n" + noisy)
    r = rlw("refresh", "espo", cwd=checkout)
    assert r.returncode == 0, r.stdout
    first = path.read_bytes()
    nb = json.loads(first)
    kinds = [(o["output_type"], sorted(o.get("data", {}))) for o in nb["cells"][1]["outputs"]]
    assert kinds == [("stream", []), ("display_data", ["image/png", "text/plain"])], kinds
    assert "".join(nb["cells"][1]["outputs"][0]["text"]) == "table\nwrote runs/07_espo/refresh/07_espo.json\n"
    assert "widgets" not in nb["metadata"] and len(nb["cells"]) == 2 and nb["cells"][0]["metadata"] == {"tags": ["parameters"]}
    assert rlw("refresh", "espo", cwd=checkout).returncode == 0
    assert path.read_bytes() == first                                        # n11: a rerun changes nothing
    (checkout / "settings.ini").write_text((root / "settings.ini").read_text())
    subprocess.run([str(Path(sys.executable).parent / "nbdev_clean"), "--fname", "nbs"], cwd=checkout, check=True, capture_output=True)
    assert path.read_bytes() == first                                        # and neither does nbdev's cleaner

def test_refresh_that_fails_leaves_the_notebook(checkout, make_notebook):
    path = make_notebook("07_espo", PARAMETERS, "print('new')", "1/0")
    before = path.read_bytes()
    r = rlw("refresh", "espo", cwd=checkout)
    assert r.returncode == 1 and path.read_bytes() == before and "ZeroDivisionError" in r.stdout

def test_n11_conflict_markers_are_named(checkout, make_notebook):
    path = make_notebook("07_espo", PARAMETERS)
    path.write_text("<<<<<<< HEAD\n" + path.read_text())
    r = rlw("run", "espo", cwd=checkout)
    assert r.returncode == 2 and "07_espo.ipynb is not a readable notebook" in r.stdout

def test_a_planned_chapter_says_so(root):
    run = rlw("run", "8", cwd=root)
    assert run.returncode != 0 and "08 CorVer is planned: its chapter is not written yet" in run.stdout

def test_a_model_folder_is_meant_from_where_the_command_was_given(tmp_path, monkeypatch):
    from rlworkbench.jobs import _given
    (tmp_path/"my model").mkdir(); monkeypatch.chdir(tmp_path)
    assert _given("smoke", "./my model", (), ()) == {"scale": "smoke", "model": str(tmp_path/"my model")}
    assert _given(None, None, (("model", "my model"),), ())["model"] == str(tmp_path/"my model")
    assert _given(None, "chain-habits", (), ()) == {"model": "chain-habits"}
