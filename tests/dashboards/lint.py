#!/usr/bin/env python3
"""Checks dashboards/ against itself and against the sources that export metrics.

  lint.py ROOT
Boards: unique uids, titles and panel ids; a unit and a description on every panel; every query through
the datasource variable; the JSON is what generate.py writes. Names: every metric used in a board or
rule is exported or recorded; every metric exported is used, or explained in METRICS.md.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

root = pathlib.Path(sys.argv[1])
boards = sorted((root / "dashboards/grafana").glob("*.json"))
problems = []


def check(good, text):
    if not good:
        problems.append(text)


def exported():
    """Names in string literals of the two files that export; histograms also as their series."""
    names = set()
    for source in ("worker/agent/metrics.cc", "controller/api/metrics.cc"):
        names |= set(re.findall(r'"(octavo_[a-z0-9_]+)"', (root / source).read_text()))
    return names


def used(text):
    return set(re.findall(r"(?<![a-z0-9_:])octavo_[a-z0-9_]+", text))


check(len(boards) >= 4, f"{len(boards)} boards")
uids, titles, expressions = [], [], []
for path in boards:
    board = json.loads(path.read_text())
    uids.append(board["uid"])
    titles.append(board["title"])
    variables = [v for v in board["templating"]["list"] if v["type"] == "datasource"]
    check(len(variables) == 1 and variables[0]["name"] == "datasource", f"{path.name}: datasource variable")
    for v in board["templating"]["list"]:
        expressions.append(v.get("definition", ""))
    ids = [p["id"] for p in board["panels"]]
    check(len(ids) == len(set(ids)), f"{path.name}: panel ids {ids}")
    names = [p["title"] for p in board["panels"]]
    check(len(names) == len(set(names)), f"{path.name}: panel titles repeat")
    for p in board["panels"]:
        where = f"{path.name}: {p['title']}"
        check(p["fieldConfig"]["defaults"].get("unit"), where + ": no unit")
        check(len(p.get("description", "")) > 10, where + ": no description")
        check(p["datasource"]["uid"] == "${datasource}", where + ": datasource")
        check(p["targets"], where + ": no query")
        for t in p["targets"]:
            check(t["datasource"]["uid"] == "${datasource}", where + ": datasource of a query")
            expressions.append(t["expr"])
    for a in board["annotations"]["list"]:
        expressions.append(a["expr"])
check(len(uids) == len(set(uids)) and len(titles) == len(set(titles)), "uids or titles repeat")

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, root / "dashboards/generate.py", folder], check=True)
    for path in boards:
        again = pathlib.Path(folder) / path.name
        check(again.exists() and again.read_text() == path.read_text(),
              f"{path.name} is not what generate.py writes: run it")

rules = "".join((root / "dashboards/rules" / name).read_text() for name in ("recording.yml", "alerts.yml"))
expressions += re.findall(r"^\s*expr: (.*)$", rules, re.M)
recorded = set(re.findall(r"^\s*- record: (\S+)", rules, re.M))
check(recorded, "no recording rules found")

known = exported()
base = lambda n: re.sub(r"_(bucket|sum|count)$", "", n)
in_use = set()
for e in expressions:
    in_use |= used(e)
    for record in re.findall(r"[a-z_]+:octavo_[a-z0-9_]+:[a-z0-9_]+", e):
        check(record in recorded, f"{record} is used and not recorded")
for name in sorted(in_use):
    check(name in known or base(name) in known, f"{name} is used and nobody exports it")
documented = used((root / "dashboards/METRICS.md").read_text())
for name in sorted(known - {base(n) for n in in_use}):
    check(name in documented, f"{name} is exported and neither used nor in dashboards/METRICS.md")
for name in sorted(documented - known):
    check(False, f"{name} is in dashboards/METRICS.md and nobody exports it")

for p in problems:
    print(p)
print(f"{len(boards)} boards, {len(expressions)} expressions, {len(known)} metrics, {len(problems)} problems")
sys.exit(bool(problems))
