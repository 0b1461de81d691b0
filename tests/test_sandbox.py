"Programs of a model: each ends within its limit with a message, nothing of it stays alive, and it sees nothing of ours. S1-S7 and what else such programs do."
import os, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest
from rlworkbench.toolbox import sandbox
from rlworkbench.toolbox.sandbox import LEVELS, Limits, Result, best_level, guarantees, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
ROOT = Path(__file__).parent.parent
HERE = [l for l in LEVELS if sandbox._run("print(42)", Limits(seconds=10), l).get("output") == "42\n"] if sys.platform == "linux" else []
STRONG = "namespaces" in HERE
at_every_level = pytest.mark.parametrize("level", HERE)
needs_walls = pytest.mark.skipif(not STRONG, reason="this system allows no namespaces")
SYSTEM_PYTHON = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.access(p, os.X_OK)), None)


def running(mark, within=1.5):
    "Numbers of the living processes whose command holds `mark`, once the kernel has had the time to take the dead ones away."
    until = time.monotonic() + within
    while (found := _alive(mark)) and time.monotonic() < until: time.sleep(.02)
    return found

def _alive(mark):
    found = []
    for p in Path("/proc").iterdir():
        try:
            if p.name.isdigit() and mark in (p/"cmdline").read_bytes().decode("utf-8", "replace") and int(p.name) != os.getpid() and (p/"stat").read_text().rpartition(")")[2].split()[0] not in "ZX": found.append(int(p.name))
        except OSError: pass
    return found


def timed(code, **kw):
    began = time.monotonic()
    r = run_python(code, **kw)
    return r, time.monotonic() - began


# ---------------------------------------------------------------- S1
def test_s1_time_limit_eight_at_once():
    with ThreadPoolExecutor(8) as pool: found = list(pool.map(lambda _: timed("while True: pass", limits=Limits(seconds=2.)), range(8)))
    assert [r.kind for r, _ in found] == ["timed out"]*8 and max(t for _, t in found) < 3.
    assert running("program-") == []
    before, w = time.process_time(), os.times()
    time.sleep(.2)
    assert os.times().children_user - w.children_user < .05             # nobody of ours still works


@at_every_level
def test_s1_time_limit(level):
    r, took = timed("print('here')\nwhile True: pass", limits=Limits(seconds=1.), level=level)
    assert r.kind == "timed out" and 1. <= took < 2. and r.output == "here\n" and r.observation.startswith("timed out")


# ---------------------------------------------------------------- S2
CHILDREN = """
import subprocess, sys, time
for new in (True, False): subprocess.Popen(["/usr/bin/env", "sleep", "{mark}"], start_new_session=new)
time.sleep(.5)
{end}
"""

@at_every_level
@pytest.mark.parametrize("end", ("while True: pass", "print('done')"))
def test_s2_children_end_with_the_program(level, end):
    mark = f"60.{LEVELS.index(level)}{len(end)}91"
    r, took = timed(CHILDREN.format(mark=mark, end=end), limits=Limits(seconds=1.), level=level)
    assert r.kind == ("timed out" if "while" in end else "ok") and took < 3. and r.most_processes >= 3
    assert running(mark) == []


@at_every_level
def test_s2_a_daemon_that_forks_twice_ends_too(level):
    code = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.close(1); os.close(2)\n  os.execv('/usr/bin/env', ['env', 'sleep', '61.7%d'])\n os._exit(0)\ntime.sleep(.3)" % LEVELS.index(level)
    r, _ = timed(code, limits=Limits(seconds=5.), level=level)
    assert r.kind == "ok" and running(f"61.7{LEVELS.index(level)}") == []


@at_every_level
@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGINT))
def test_s2_everything_ends_with_the_caller(level, how):
    mark = f"62.{LEVELS.index(level)}{int(how)}3"
    code = f"import subprocess, time\nsubprocess.Popen(['/usr/bin/env', 'sleep', '{mark}'], start_new_session=True)\ntime.sleep(50)"
    caller = subprocess.Popen([sys.executable, "-c", f"from rlworkbench.toolbox.sandbox import *; run_python({code!r}, Limits(seconds=40.), {level!r})"], cwd=ROOT, stderr=subprocess.DEVNULL)
    def wait(there, seconds):
        until = time.monotonic() + seconds
        while bool([p for p in running(mark) if p != caller.pid]) != there and time.monotonic() < until: time.sleep(.05)
        return [p for p in running(mark) if p != caller.pid]
    sleeping = lambda: [p for p in running("sleep") if mark in Path(f"/proc/{p}/cmdline").read_text()]
    until = time.monotonic() + 8
    while not sleeping() and time.monotonic() < until: time.sleep(.05)
    assert sleeping()
    caller.send_signal(how); caller.wait()
    left = wait(False, 3)
    for p in left: os.kill(p, 9)
    assert left == []


# ---------------------------------------------------------------- S3
SPY = """
import os, sys
print(dict(os.environ), os.path.expanduser('~'), sys.path, os.getcwd())
print(os.listdir(os.path.expanduser('~')), os.listdir('.'))
for path in {paths!r}:
    try: print(open(path, 'rb').read())
    except OSError as e: print(type(e).__name__)
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    for what in ('environ', 'cmdline'):
        try: print(open(f'/proc/{{pid}}/{{what}}', 'rb').read())
        except OSError as e: print(type(e).__name__)
"""

@at_every_level
def test_s3_secrets(level, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "abc123"); monkeypatch.setenv("PYTHONPATH", str(tmp_path/"mine")); monkeypatch.chdir(tmp_path)
    (tmp_path/".env").write_text("SECRET=xyz789"); (tmp_path/".env").chmod(0o600)
    paths = [".env", str(tmp_path/".env"), f"/proc/{os.getpid()}/environ", f"/proc/{os.getppid()}/environ"] if level != "plain" else [".env"]
    r = run_python(SPY.format(paths=paths).replace("[p for p in os.listdir('/proc') if p.isdigit()]", "[p for p in os.listdir('/proc') if p.isdigit()]" if level != "plain" else "['self']"), Limits(seconds=5., output_bytes=200_000), level)
    assert r.kind == "ok", r
    for secret in ("HF_TOKEN", "abc123", "SECRET", "xyz789", "PYTHONPATH", str(tmp_path/"mine")): assert secret not in r.output
    assert "[] []" in r.output                                             # HOME and the working folder are empty
    if level == "namespaces": assert str(tmp_path) not in r.output and r.output.count("FileNotFoundError") >= 4


@needs_walls
def test_s3_files_and_network_are_out_of_reach(tmp_path):
    (tmp_path/"public").write_text("readable by all"); (tmp_path/"public").chmod(0o644)
    code = f"""
import os, socket
print(os.path.exists({str(tmp_path)!r}), os.path.exists({str(ROOT)!r}), sorted(os.listdir('/')))
for path in ('/etc/passwd', '/root', os.path.expanduser('~/x'), '/usr/mine', '/program.py2'):
    try: open(path, 'w'); print('wrote', path)
    except OSError as e: print(type(e).__name__)
try: socket.create_connection(('1.1.1.1', 53), timeout=1); print('connected')
except OSError as e: print('no network', type(e).__name__)
"""
    r = run_python(code, Limits(seconds=5.))
    assert r.output.startswith("False False") and "connected" not in r.output and r.output.count("wrote") == 1, r.output   # its own home


def test_s3_nothing_stays_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    for level in HERE:
        run_python("open('a', 'w').write('x'*1000); print(open('a').read())", level=level)
        assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- S4
BOMB = """
import os, time
made = 0
for _ in range(500):
    try:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        made += 1
    except OSError: break
print(made, flush=True)
time.sleep(.3)
"""

@pytest.mark.parametrize("level", [l for l in HERE if l != "plain"] or [pytest.param("", marks=pytest.mark.skip(reason="no level here can cap processes by the kernel"))])
def test_s4_fork_bomb(level):
    r, took = timed(BOMB, limits=Limits(seconds=3., processes=32), level=level)
    assert r.kind == "ok" and int(r.output) <= 31 and r.most_processes <= 32 and took < 3.5, r
    assert run_python("print(1)").observation == "1"


def test_s4_a_bomb_that_never_stops_is_ended():
    r, took = timed("import os\nwhile True:\n try: os.fork()\n except OSError: pass", limits=Limits(seconds=1., processes=32))
    assert r.kind in ("timed out", "killed", "too many processes") and took < 2.5 and r.most_processes <= 33 and running("program-") == []


@pytest.mark.skipif(os.getuid() != 0 or SYSTEM_PYTHON is None, reason="needs root, to become another user, and a system Python that others may run")
def test_s4_as_a_user(tmp_path):
    script = tmp_path/"as_user.py"; tmp_path.chmod(0o755)
    module = tmp_path/"sandbox.py"; module.write_text(Path(sandbox.__file__).read_text())
    script.write_text(f"import os, sys, tempfile; os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.path.insert(0, {str(tmp_path)!r}); tempfile.tempdir = '/tmp'\n"
                      f"from sandbox import *\nr = run_python({BOMB!r}, Limits(seconds=3., processes=32))\nprint(best_level(), r.kind, int(r.output or -1), r.most_processes, run_python('print(6*7)').output.strip(), r.output if r.kind != 'ok' else '')\n")
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")): parent.chmod(0o755)     # with xdist there is one folder more
    found = subprocess.run([SYSTEM_PYTHON, str(script)], capture_output=True, text=True, timeout=20, cwd="/", env=dict(PATH="/usr/bin:/bin"))
    level, kind, made, most, after = found.stdout.split()[:5]
    assert kind == "ok" and 0 <= int(made) <= 31 and int(most) <= 32 and after == "42", found


# ---------------------------------------------------------------- S5
def memory_mb():
    "What this process takes, in MB."
    return int(Path("/proc/self/statm").read_text().split()[1])*os.sysconf("SC_PAGE_SIZE")/2**20


@at_every_level
@pytest.mark.parametrize("code", ("x = bytearray(4 << 30)", "x = bytearray(10 << 30)", "x = []\nwhile True: x.append(bytearray(50 << 20))",
                                  "import os, time\nfor _ in range(4):\n if os.fork() == 0:\n  x = bytearray(b'1')*(400 << 20); time.sleep(20)\ntime.sleep(20)"))
def test_s5_memory_cap(level, code):
    before = memory_mb()
    r, took = timed(code, limits=Limits(seconds=4., memory_mb=512), level=level)
    assert r.kind == "out of memory" and r.observation == "out of memory" and took < 5., r
    assert memory_mb() - before < 50 and run_python("print(1)", level=level).output == "1\n"


# ---------------------------------------------------------------- S6
def test_s6_short_limits_everywhere():
    looped = lambda: timed("while True: pass", limits=Limits(seconds=.5))
    found = [looped()]
    with ThreadPoolExecutor(1) as pool: found.append(pool.submit(looped).result())
    import ipywidgets
    button = ipywidgets.Button()
    button.on_click(lambda _: found.append(looped()))
    button.click()
    assert [r.kind for r, _ in found] == ["timed out"]*3 and max(t for _, t in found) < 1.5


# ---------------------------------------------------------------- S7
@at_every_level
@pytest.mark.parametrize("code,kind,error,exit_code,observation", (
    ("def f(:", "error", "SyntaxError", 1, "SyntaxError: invalid syntax"), ("1/0", "error", "ZeroDivisionError", 1, "ZeroDivisionError: division by zero"),
    ("exit(3)", "exit", "", 3, "exit: code 3"), ("input()", "error", "EOFError", 1, "EOFError: EOF when reading a line"), ("", "ok", "", 0, "(no output)"),
    ("x = 1", "ok", "", 0, "(no output)"), ("print('ä', 2)", "ok", "", 0, "ä 2"), ("import os, signal; os.kill(os.getpid(), 9)", "killed", "", -9, "killed"),
    ("raise KeyError", "error", "KeyError", 1, "KeyError"), ("print('ValueError: no')\nexit(1)", "exit", "", 1, "exit: code 1\nValueError: no")))
def test_s7_errors_are_observations(level, code, kind, error, exit_code, observation):
    r, took = timed(code, limits=Limits(seconds=5.), level=level)
    assert (r.kind, r.error, r.exit_code, r.observation) == (kind, error, exit_code, observation) and took < 4.


def test_s7_an_episode_goes_on_after_an_error():
    "A world whose tool is the sandbox: the error is read, the rollout ends in an answer, its reward is a number."
    from rlworkbench.worlds.base import Problem, World
    class Code(World):
        call_end = "</c>"
        def respond(self, prompt, completion): return f"<o>{run_python(completion.rpartition('<c>')[2][:-4]).observation}</o>"
        def verify(self, problem, completion): return float(completion.endswith("4"))
    world, text = Code(), ""
    for call in ("<c>1/0</c>", "<c>exit(3)</c>", "<c>print(2+2)</c>"): text += call; text += world.respond("", text)
    assert text == "<c>1/0</c><o>ZeroDivisionError: division by zero</o><c>exit(3)</c><o>exit: code 3</o><c>print(2+2)</c><o>4</o>"
    assert world.verify(Problem("", "4"), text + "4") == 1.


# ---------------------------------------------------------------- other programs
@at_every_level
def test_output_flood(level):
    r, took = timed("while True: print('a'*1000)", limits=Limits(seconds=3., output_bytes=5000), level=level)
    assert r.kind == "too much output" and len(r.output) == 5000 and took < 1.5


@at_every_level
def test_a_child_that_keeps_the_output_open_holds_nothing_up(level):
    r, took = timed("import subprocess; subprocess.Popen(['/usr/bin/env', 'sleep', '63.25'], start_new_session=True); print('done')", limits=Limits(seconds=5.), level=level)
    assert r.kind == "ok" and r.output == "done\n" and took < 2. and running("63.25") == []


@at_every_level
def test_a_large_file_is_refused(level):
    r, _ = timed("f = open('big', 'wb')\nfor _ in range(100): f.write(b'0'*(1 << 20))", limits=Limits(seconds=5., disk_mb=16), level=level)
    assert r.kind in ("error", "killed") and r.error in ("OSError", "")


def test_a_long_program_and_odd_text():
    assert run_python("x = 0\n" + "x += 1\n"*50_000 + "print(x)", Limits(seconds=10.)).output == "50000\n"
    assert run_python("print('\\ud800')", Limits(seconds=5.)).kind in ("ok", "error")
    assert run_python("import sys; sys.stdout.buffer.write(bytes(range(256)))").kind == "ok"
    assert run_python("\ud800").kind in ("error", "no sandbox", "exit") and run_python("a\0b").kind == "error"


def test_signals_of_a_program_do_not_reach_us():
    r = run_python("import os, signal\nfor pid in (1, os.getppid()):\n try: os.kill(pid, signal.SIGKILL)\n except OSError as e: print(type(e).__name__)\nprint('still here')", Limits(seconds=5.), level="namespaces" if STRONG else None)
    assert r.kind in ("ok", "killed")


def test_what_is_promised_is_said():
    g = guarantees()
    assert g["level"] == best_level() in (*HERE, "none") and g["environment_hidden"] is True
    assert guarantees("plain")["files_hidden"] is False and "may win" in guarantees("plain")["all_processes_end"]
    with pytest.raises(ValueError, match="use one of namespaces, user, plain"): run_python("1", level="jail")
    with pytest.raises(ValueError, match="memory_mb=0"): Limits(memory_mb=0)


def test_a_level_that_does_not_work_is_said_and_no_answer():
    missing = next((l for l in LEVELS if l not in HERE and not (l == "user" and os.getuid() != 0)), None)
    if missing is None: pytest.skip("all levels work here")
    r = run_python("print(1)", level=missing)
    assert r.kind == "no sandbox" and r.output and r.observation.startswith("no sandbox")


def test_files_of_ours_stay_open_and_ours(tmp_path):
    "No file that the caller has open reaches the program."
    with open(tmp_path/"x", "w") as f:
        os.set_inheritable(f.fileno(), True)
        assert run_python("import os\nprint(sorted(int(x) for x in os.listdir('/proc/self/fd')))", Limits(seconds=5.)).output.strip() in ("[0, 1, 2, 3]", "[0, 1, 2, 3, 4]")
