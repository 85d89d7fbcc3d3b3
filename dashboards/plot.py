#!/usr/bin/env python3
"""Draws the FP8 health board's queries to PNG from a running Prometheus.

  dashboards/plot.py --prometheus 127.0.0.1:9090 --job NAME [--minutes 5] [--step 2] [--out FOLDER]
Needs Debian's python3-matplotlib. The expressions are read from dashboards/grafana/fp8-health.json, so
the pictures show what the board shows. Each file stays below 200 KiB.
"""
import argparse
import json
import pathlib
import re
import sys
import time
import urllib.parse
import urllib.request

try:
    import matplotlib
except ImportError:
    sys.exit("plot.py: matplotlib is missing; on Debian: apt-get install python3-matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
PICTURES = {  # file: panels of the board
    "fp8-health.png": ["SQNR by layer", "Saturated ratio", "Flushed ratio", "amax, worst five"],
    "precision.png": ["Effective recipe", "Precision changes"],
}
SERIES_MAX = 8  # in a legend


def query(server, expression, start, end, step):
    values = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step})
    with urllib.request.urlopen(f"http://{server}/api/v1/query_range?{values}", timeout=30) as answer:
        return json.load(answer)["data"]["result"]


def legend(template, labels):
    return re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), template)


def draw(axes, panel, results):
    axes.set_title(panel["title"], fontsize=9, loc="left")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_ylabel({"percentunit": "share", "none": "", "short": ""}.get(unit, unit), fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if panel["type"] == "state-timeline":  # a row per layer and op, a colour per recipe
        rows, colours = sorted({r["metric"]["layer"] + " " + r["metric"]["op"] for _, r in results}), {}
        for _, r in results:
            recipe = r["metric"]["recipe"]
            colour = colours.setdefault(recipe, f"C{len(colours)}")
            y = rows.index(r["metric"]["layer"] + " " + r["metric"]["op"])
            t = [float(p[0]) for p in r["values"]]
            axes.scatter([x - draw.start for x in t], [y] * len(t), marker="s", s=9, color=colour)
        for recipe, colour in colours.items():
            axes.scatter([], [], marker="s", color=colour, label=recipe)
        axes.set_yticks(range(len(rows)), rows, fontsize=6)
        axes.legend(fontsize=7, loc="upper right")
        return
    # The series that move most say most.
    def spread(r):
        values = [float(p[1]) for p in r["values"] if p[1] not in ("NaN", "+Inf", "-Inf")]
        return max(values) - min(values) if values else -1
    for template, r in sorted(results, key=lambda x: -spread(x[1]))[:SERIES_MAX]:
        points = [(float(t) - draw.start, float(v)) for t, v in r["values"]]
        axes.plot(*zip(*points), label=legend(template, r["metric"]), linewidth=1)
    axes.legend(fontsize=6, loc="best")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prometheus", default="127.0.0.1:9090")
    parser.add_argument("--job", required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--step", type=float, default=2, help="seconds between points")
    parser.add_argument("--interval", default="15s", help="$__rate_interval")
    parser.add_argument("--out", default=str(HERE / "pictures"))
    args = parser.parse_args()
    board = json.loads((HERE / "grafana/fp8-health.json").read_text())
    panels = {p["title"]: p for p in board["panels"]}
    end = time.time()
    draw.start = end - args.minutes * 60
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    for name, titles in PICTURES.items():
        figure, all_axes = plt.subplots(len(titles), 1, figsize=(9, 2.4 * len(titles)), sharex=True)
        for axes, title in zip(all_axes, titles):
            results = []
            for target in panels[title]["targets"]:
                expression = (target["expr"].replace("$train_job", args.job).replace("$layer", ".*")
                              .replace("$__rate_interval", args.interval).replace("$__interval", args.interval))
                results += [(target["legendFormat"], r)
                            for r in query(args.prometheus, expression, draw.start, end, args.step)]
            draw(axes, panels[title], results)
        all_axes[-1].set_xlabel("seconds", fontsize=8)
        figure.suptitle(f"{args.job}: {board['title']}", fontsize=10)
        figure.tight_layout()
        path = pathlib.Path(args.out) / name
        figure.savefig(path, dpi=90)
        size = path.stat().st_size
        print(f"{path}: {size // 1024} KiB")
        if size >= 200 * 1024:
            raise SystemExit(f"{path} has {size} bytes; at most 200 KiB")


if __name__ == "__main__":
    main()
