#!/usr/bin/env python3
"""Writes dashboards/grafana/*.json from the table below. Run it after a change; the tidy test compares.

Plain JSON that Grafana's file provisioning loads: stable uids, a datasource variable, no __inputs,
a unit and a description (what to do) on every panel.
"""
import json
import pathlib
import sys

DS = {"type": "prometheus", "uid": "${datasource}"}
JOB = '{train_job=~"$train_job"}'
LAYER = '{train_job=~"$train_job",layer=~"$layer"}'


def panel(title, kind, unit, description, *targets, width=12, height=8):
    return {"title": title, "type": kind, "unit": unit, "description": description,
            "targets": targets, "w": width, "h": height}


def ts(title, unit, description, *targets, **k):
    return panel(title, "timeseries", unit, description, *targets, **k)


BOARDS = {
    "fleet": ("Octavo / Fleet", [], [
        panel("Jobs by state", "stat", "short", "How many jobs are in each state. FAILED growing: octavo describe JOB.",
              ("sum by (state) (octavo_jobs)", "{{state}}"), width=24, height=4),
        ts("Workers by state", "short", "READY should equal the fleet. SILENT workers have missed heartbeats: octavo workers.",
           ("sum by (state) (octavo_workers)", "{{state}}")),
        ts("Waiting jobs by reason", "short", "Every waiting job has one reason; octavo describe JOB gives the numbers.",
           ("sum by (reason) (octavo_pending_jobs)", "{{reason}}")),
        ts("Slots", "short", "Free slots with waiting jobs mean fragmentation or a drain.",
           ("sum(octavo_worker_slots)", "all"), ("sum(octavo_worker_slots_free)", "free")),
        ts("Attempts by outcome", "short", "Ends of attempts per hour by failure class; SUCCEEDED is the healthy one.",
           ("sum by (reason) (increase(octavo_job_attempts_total[1h]))", "{{reason}}")),
        ts("Time in the queue, p90", "s", "90th percentile of the wait from submission to placement.",
           ("histogram_quantile(0.9, sum by (le) (rate(octavo_queue_wait_seconds_bucket[$__rate_interval])))", "p90")),
        ts("Heartbeat age", "s", "Seconds since each worker's last heartbeat; the lease is 10 s.",
           ("time() - octavo_worker_last_heartbeat_timestamp_seconds", "{{worker}}")),
    ]),
    "job": ("Octavo / Job", ["train_job"], [
        ts("Loss", "none", "Training loss; a spike sends FP8 layers to bf16 by itself. See FP8 health.",
           ("octavo_train_loss" + JOB, "{{train_job}} train"), ("octavo_train_validation_loss" + JOB, "{{train_job}} validation")),
        ts("Tokens per second", "short", "All ranks together.",
           ("sum by (train_job) (rate(octavo_train_tokens_total" + JOB + "[$__rate_interval]))", "{{train_job}}")),
        ts("Step time by phase, mean", "s", "Where a step's time goes. dispatch growing alone: look at expert imbalance.",
           ("sum by (phase) (rate(octavo_step_seconds_sum" + JOB + "[$__rate_interval])) / sum by (phase) (rate(octavo_step_seconds_count" + JOB + "[$__rate_interval]))", "{{phase}}")),
        ts("Gradient norm", "none", "Global, before clipping.", ("octavo_train_grad_norm" + JOB, "{{train_job}}")),
        ts("FP8 share of executed GEMM FLOPs", "percentunit", "What really ran in FP8, counted where it ran.",
           ("sum by (train_job) (rate(octavo_train_flops_total{train_job=~\"$train_job\",precision=~\"fp8.*|mxfp8\"}[$__rate_interval])) / sum by (train_job) (rate(octavo_train_flops_total" + JOB + "[$__rate_interval]))", "{{train_job}}")),
        ts("Expert load, most loaded over mean", "none", "1 is perfect balance; above 3 the receive capacity is in danger.",
           ("max by (train_job, layer) (octavo_expert_load_ratio{train_job=~\"$train_job\",stat=\"max\"})", "layer {{layer}}")),
        ts("All-to-all bytes per second", "Bps", "Bytes leaving ranks for dispatch and combine.",
           ("sum by (train_job) (rate(octavo_alltoall_bytes_total" + JOB + "[$__rate_interval]))", "{{train_job}}")),
        ts("Learning rate", "none", "As applied.", ("octavo_learning_rate" + JOB, "{{train_job}}")),
        ts("Checkpoint age", "s", "Seconds since the newest complete checkpoint.",
           ("time() - octavo_checkpoint_last_success_timestamp_seconds" + JOB, "{{train_job}}")),
        ts("Time since the last step", "s", "A stall shows as a ramp.",
           ("time() - octavo_last_step_timestamp_seconds" + JOB, "{{train_job}}")),
    ]),
    "fp8-health": ("Octavo / FP8 health", ["train_job", "layer"], [
        panel("Effective recipe", "state-timeline", "none", "What ranks really ran, per layer and op. A gap to the plan is a mismatch: octavo precision show JOB.",
              ('sum by (layer, op, recipe) (octavo_layer_recipe_info' + LAYER + ')', "{{layer}} {{op}} {{recipe}}"), width=24),
        ts("SQNR by layer", "dB", "10·log10 of signal over noise energy. Below 25 dB (E4M3) the policy falls back.",
           ("10 * log10(sum by (layer, op) (rate(octavo_fp8_signal_energy_total" + LAYER + "[$__rate_interval])) / sum by (layer, op) (rate(octavo_fp8_noise_energy_total" + LAYER + "[$__rate_interval])))", "{{layer}} {{op}}")),
        ts("Saturated ratio", "percentunit", "Elements changed by more than rounding. Above 0.1 % fp8_delayed falls back.",
           ("sum by (layer, op) (rate(octavo_fp8_saturated_elements_total" + LAYER + "[$__rate_interval])) / sum by (layer, op) (rate(octavo_fp8_elements_total" + LAYER + "[$__rate_interval]))", "{{layer}} {{op}}")),
        ts("Flushed ratio", "percentunit", "Non-zero elements that became zero. Above 5 % (gradients 25 %) the policy falls back.",
           ("sum by (layer, op, tensor) (rate(octavo_fp8_flushed_elements_total" + LAYER + "[$__rate_interval])) / sum by (layer, op, tensor) (rate(octavo_fp8_nonzero_elements_total" + LAYER + "[$__rate_interval]))", "{{layer}} {{op}} {{tensor}}")),
        ts("amax, worst five", "none", "Largest magnitudes; a jump of ten times is an alert.",
           ("topk(5, max by (layer, op, tensor) (octavo_fp8_amax" + LAYER + "))", "{{layer}} {{op}} {{tensor}}")),
        ts("dequant_scale, largest", "none", "Against the same op in other layers; ten times the median is an outlier.",
           ("topk(5, max by (layer, op, tensor) (octavo_fp8_dequant_scale_max" + LAYER + "))", "{{layer}} {{op}} {{tensor}}")),
        ts("Transpose-flushed ratio", "percentunit", "Lost in the scaling-aware transpose of fp8_flow; above 10 % wgrad goes to bf16.",
           ("sum by (layer, op) (rate(octavo_fp8_transpose_flushed_elements_total" + LAYER + "[$__rate_interval])) / sum by (layer, op) (rate(octavo_fp8_nonzero_elements_total" + LAYER + "[$__rate_interval]))", "{{layer}} {{op}}")),
        ts("Non-finite elements", "short", "Counted before the cast. Any is a retried step.",
           ("sum by (layer, op) (increase(octavo_fp8_nonfinite_elements_total" + LAYER + "[$__rate_interval]))", "{{layer}} {{op}}")),
        ts("Retried and skipped steps", "short", "Steps with a non-finite gradient, by what happened to them.",
           ("sum by (train_job, outcome) (increase(octavo_nonfinite_steps_total" + JOB + "[$__rate_interval]))", "{{train_job}} {{outcome}}")),
        ts("Precision changes", "short", "Fallbacks, returns and operator switches: octavo precision history JOB.",
           ("sum by (train_job, direction, reason) (increase(octavo_precision_changes_total" + JOB + "[$__rate_interval]))", "{{direction}} {{reason}}")),
        ts("Planned is not executed", "short", "Products that ran in another recipe than planned. Should be empty.",
           ("sum by (layer, op, reason) (increase(octavo_precision_mismatch_total" + LAYER + "[$__rate_interval]))", "{{layer}} {{op}} {{reason}}")),
    ]),
    "control-plane": ("Octavo / Control plane", [], [
        ts("RPCs per second", "reqps", "By method and code; UNAVAILABLE from clients means restarts or certificates.",
           ("sum by (method, code) (rate(octavo_rpc_requests_total[$__rate_interval]))", "{{method}} {{code}}")),
        ts("RPC latency, p99", "s", "Submit should stay below 20 ms.",
           ("histogram_quantile(0.99, sum by (le, method) (rate(octavo_rpc_seconds_bucket[$__rate_interval])))", "{{method}}")),
        ts("Store commit, p99", "s", "Time of one durable commit; disks above 50 ms slow every submission.",
           ("histogram_quantile(0.99, sum by (le) (rate(octavo_store_commit_seconds_bucket[$__rate_interval])))", "p99")),
        ts("Scheduling pass, p99", "s", "Budget 50 ms.",
           ("histogram_quantile(0.99, sum by (le) (rate(octavo_scheduler_pass_seconds_bucket[$__rate_interval])))", "p99")),
        ts("Watch streams", "short", "Open WatchJob streams.", ("octavo_watch_streams", "streams")),
        ts("Telemetry dropped", "short", "Reports left out because a queue was full; training never waits for telemetry.",
           ("sum by (reason) (increase(octavo_telemetry_dropped_total[$__rate_interval]))", "{{reason}}")),
    ]),
}


def variable(name):
    queries = {"train_job": "label_values(octavo_train_job_info, train_job)",
               "layer": 'label_values(octavo_layer_recipe_info{train_job=~"$train_job"}, layer)'}
    return {"name": name, "label": name, "type": "query", "datasource": DS, "query": {"query": queries[name], "refId": name},
            "definition": queries[name], "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*", "sort": 3,
            "current": {"text": "All", "value": "$__all"}}


def board(uid, title, variables, panels):
    out, x, y, row = [], 0, 0, 0
    for i, p in enumerate(panels):
        if x + p["w"] > 24:
            x, y, row = 0, y + row, 0
        out.append({"id": i + 1, "title": p["title"], "type": p["type"], "description": p["description"], "datasource": DS,
                    "gridPos": {"x": x, "y": y, "w": p["w"], "h": p["h"]},
                    "fieldConfig": {"defaults": {"unit": p["unit"]}, "overrides": []}, "options": {},
                    "targets": [{"refId": chr(65 + j), "datasource": DS, "expr": e, "legendFormat": legend}
                                for j, (e, legend) in enumerate(p["targets"])]})
        x, row = x + p["w"], max(row, p["h"])
    annotations = [{"name": "Precision plan", "datasource": DS, "enable": True, "iconColor": "orange",
                    "expr": "changes(octavo_plan_version[$__interval]) > 0", "titleFormat": "plan changed on {{train_job}}"}]
    return {"uid": "octavo-" + uid, "title": title, "tags": ["octavo"], "schemaVersion": 39, "version": 1, "editable": False,
            "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "", "annotations": {"list": annotations},
            "templating": {"list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
                           + [variable(v) for v in variables]},
            "panels": out}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "grafana")
    folder.mkdir(parents=True, exist_ok=True)
    for uid, (title, variables, panels) in BOARDS.items():
        text = json.dumps(board(uid, title, variables, panels), indent=1, ensure_ascii=False) + "\n"
        (folder / (uid + ".json")).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
