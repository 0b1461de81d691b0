"Cases V1 to V12: each gold and answer with the verdict that is required."
import time
from concurrent.futures import ThreadPoolExecutor
import pytest
from rlworkbench.worlds.judge import JUDGE, judge


def check(gold, *pairs, **options):
    for answer, want in pairs: assert judge(gold=gold, answer=answer, **options) == want, (gold, answer, options)


def test_v1_tiny_values():
    check(r"$\frac{1}{40!}$", (r"$\frac{1}{41!}$", 0))
    check("$0.00000003$", ("$0.00000005$", 0))
    check(r"$\frac{1}{3^{60}}$", (r"$\frac{1}{3^{60}}$", 1), (r"$\frac{1}{3^{61}}$", 0))

def test_v2_partial_parse():
    gold = r"$2+\frac{3}{\mathrm{e}}$"
    check(gold, (r"$2-\frac{3}{\mathrm{e}}$", 0), (gold, 1))
    check("3", ("3x+", 0), (r"$3 + \frac{1}{$", 0)) # the readable part alone would be right
    assert judge("3x+", "3") is None

def test_v3_equations_without_delimiters():
    check("2*x+5*y-1=0", ("9x - y + 4=0", 0), ("2*x+5*y-1=0", 1))
    check("$2x+5y-1=0$", ("$4x+10y-2=0$", 1), ("$4x+10y-1=0$", 0))

def test_v4_percent():
    both = (("40 percent", 1), (r"\boxed{40\%}", 1))
    check(r"$40\%$", *both, ("0.4", 1), ("40", 0))
    check(r"$40\%$", *both, ("0.4", 0), ("40", 1), percent="number")
    with pytest.raises(ValueError, match="percent="): judge("1", "1", percent=True)

def test_v5_interval_and_inequality():
    check("$-2<t<7$", ("$(-2,7)$", 1), ("$[-2,7)$", 0))
    check("$(-2,7)$", ("$-2<t<7$", 1), ("$7>t>-2$", 1), (r"$-2\le t<7$", 0), ("$[-2,7)$", 0))
    check("$(-2,7)$", ("$-2<t<7$", 0), ("$(-2,7)$", 1), interval="strict")
    check("$-2<t<7$", ("$(-2,7)$", 1), interval="strict")

def test_v6_pairs_sets_intervals():
    check("$(2,5)$", ("$(5,2)$", 0), (r"$\{2,5\}$", 0), ("$[2,5]$", 0), (r"$\left(2,5\right)$", 1))
    check(r"$\{2,5\}$", ("5,2", 1), ("5,3", 0), ("5", 0))
    check("$(5,2)$", ("$(7,3)$", 0)) # as intervals both would be empty, and so equal

def test_v7_runaway_answers():
    judge("x", "y") # start the worker
    size = lambda: max((int(l.split()[1]) for l in open(f"/proc/{JUDGE.process.pid}/status") if l.startswith("VmHWM")), default=0)/1024
    before = size()
    for answer in ("$10^{10^{10}}+1$", "("*2000 + "7" + ")"*2000, "("*450 + "7" + ")"*450, "7"*200_000, "x+"*100_000, r"\boxed{" + "{"*2000, "$x^{x^{x^{9999999}}}$"):
        start = time.time()
        assert judge("7", answer) == 0, answer[:20]
        assert time.time() - start < 10, answer[:20]
        assert size() < before + 500
    start = time.time()
    assert judge("7", r"\boxed{7}") == 1
    assert time.time() - start < .1
    assert judge("x+1", "1+x") == 1 # and the worker is back

def test_v8_unreadable_gold():
    for gold in ("see figure", "", "3x+", "((2"):
        for answer in ("see figure", "7", r"\boxed{\frac12}", ""): assert judge(gold, answer) is None, (gold, answer)

def test_v9_answer_in_the_right_place():
    first = r"<think>try \boxed{17}</think> \boxed{12}"
    check("17", (first, 0), (r"<think>try \boxed{17} hmm", 0), (r"<think>x</think> \boxed{17}", 1))
    check("12", (first, 1))

def test_v10_markdown():
    for end in ("Final Answer: **58**", "**58**.", r"\text{58}"):
        for text in (f"We add 234 and 905.\n{end}", f"We add 234 and 905, then {end}"):
            check("58", (text, 1)); check("234", (text, 0)); check("905", (text, 0))

def test_v11_nested_braces():
    check(r"$\frac{\sqrt3}{3}$", (r"\boxed{\frac{1}{\sqrt{3}}}", 1))
    check(r"$\{5,1\}$", (r"\boxed{\{1,5\}}", 1))
    check("7", (r"\boxed{}", 0), (r"\boxed{7", 0), (r"7 or \boxed{}", 0))

def test_v12_decimals_and_floats():
    check("2/3", ("0.666667", 1), ("0.67", 0), (2/3, 1))
    check("2/3", ("0.67", 1), tolerance=.01)
    check("1/2", (.5, 1), (1e-7, 0))
    with pytest.raises(TypeError, match="an answer is text or a number"): judge("1/2", [.5])


@pytest.mark.parametrize("gold,answer,want", [
    ("18", "Janet makes 18 dollars.", 1), ("2 * 9 = 18\n#### 18", "so 2*9=18\n#### 18", 1), ("5", "$x=5$", 1), ("x=5", "5", 1), ("x=5", "y=5", 0),
    (r"$\text{even}$", "even", 1), (r"$\text{even}$", "odd", 0), ("B", "(B)", 1), (r"\frac{\pi}{2}", "pi/2", 1), ("x^2+2x+1", "(x+1)^2", 1),
    ("x^2+2x+1", "(x+1)^3", 0), (r"\sqrt{2}", "1.414214", 1), (r"\sqrt{2}", "1.41", 0), ("6", "2(3)", 1), ("7", "3 4", 0), (r"5\pm\sqrt{2}", r"5-\sqrt2, 5+\sqrt2", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", 0),
    (r"(-\infty,3]\cup[5,\infty)", r"[5,\infty)\cup(-\infty,3]", 1), (r"x\le 3", r"(-\infty,3]", 1), (r"50^\circ", "50", 1), ("1000", "1,000", 1), ("12", r"12\text{ cm}^2", 1),
    ("y=2x+1", "2x-y+1=0", 1), ("7", "7 or 8", 0), ("7", "The answer is 7 or 8", 0), ("1/0", "1", None), ("x^{10}", "x^10", 1), ("7", "", 0), ("7", None, 0),
])
def test_ways_of_writing(gold, answer, want): assert judge(gold, answer) == want


def test_judge_from_threads():
    with ThreadPoolExecutor(4) as pool: assert list(pool.map(lambda k: judge(f"x+{k}", f"{k}+x"), range(20))) == [1.]*20
