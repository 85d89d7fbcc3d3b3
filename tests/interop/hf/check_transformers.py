#!/usr/bin/env python3
"""Octavo's Hugging Face folders against transformers itself, both ways, Mixtral and Qwen3-MoE.

    tests/interop/hf/check_transformers.py --bin build/bin [--cuda]

For each family a small model is initialised by transformers at random, rounded to BF16 and saved.
  import   octavo import → octavo eval (fp32): logits and loss equal transformers' in FP32
  layouts  the same model saved with its experts stacked (transformers 5, save_original_format=False)
           gives the same logits, bit for bit; saved in F16, those of transformers from F16
  export   octavo export --format bf16: transformers loads it; every weight is bit-equal to the
           original, the logits equal Octavo's
  fp8      octavo export --format fp8: codes and scales, read by this script alone, are those of an
           independent quantiser; dequantised and run by transformers they give the logits that
           `octavo eval` computes from the FP8 folder
  own fp8  transformers loads the FP8 folder by its own quantizer: dequantised, every weight equals
           ours and so do the logits; with --cuda also as FP8, code for code
Logits must agree within 1e-4 (FP32 on both sides, logits of order 1; the sums differ in order).
Needs torch, transformers and safetensors (exit 77 without them), runs on the CPU, downloads nothing.
"""
import argparse
import inspect
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

LIMIT = 1e-4
VOCAB, LENGTH, SEQUENCES = 320, 48, 4


def families():
    common = dict(vocab_size=VOCAB, hidden_size=96, num_hidden_layers=3, num_attention_heads=6,
                  num_key_value_heads=2, head_dim=16, num_experts_per_tok=2,
                  max_position_embeddings=256, initializer_range=0.08)
    rope = dict(rope_parameters={"rope_theta": 5e4, "rope_type": "default"})
    if transformers.__version__.startswith("4."):
        rope = dict(rope_theta=5e4)
    yield "mixtral", transformers.MixtralConfig(
        num_local_experts=6, intermediate_size=160, rms_norm_eps=2e-5, bos_token_id=None,
        eos_token_id=None, **common, **rope)
    yield "qwen3_moe", transformers.Qwen3MoeConfig(
        num_experts=6, moe_intermediate_size=160, intermediate_size=192, mlp_only_layers=[1],
        norm_topk_prob=True, rms_norm_eps=1e-6, **common, **rope)
    yield "qwen3_moe_plain_weights", transformers.Qwen3MoeConfig(
        num_experts=6, moe_intermediate_size=160, norm_topk_prob=False, tie_word_embeddings=True,
        **common, **rope)


def blocked_families():
    """All matrices in whole 128×128 blocks: transformers' quantizer takes nothing else."""
    common = dict(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=64, num_experts_per_tok=2,
                  max_position_embeddings=256, initializer_range=0.08)
    yield "mixtral_blocks", transformers.MixtralConfig(
        num_local_experts=4, intermediate_size=128, bos_token_id=None, eos_token_id=None, **common)
    yield "qwen3_moe_blocks", transformers.Qwen3MoeConfig(
        num_experts=4, moe_intermediate_size=128, norm_topk_prob=True, **common)


def write_llmc(path, tokens):
    """A dataset in llm.c's format: 256 int32 of header, then uint16 tokens."""
    header = [20240520, 1, len(tokens)] + [0] * 253
    with open(path, "wb") as out:
        out.write(struct.pack("<256i", *header))
        out.write(struct.pack("<%dH" % len(tokens), *tokens))


def load_folder(folder):
    """All tensors of a folder by name."""
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(folder, name)))
    return tensors


class Octavo:
    def __init__(self, bin_dir, work):
        self.program = os.path.join(bin_dir, "octavo")
        self.work = work

    def run(self, *arguments):
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            sys.exit("octavo %s: exit %d\n%s%s" % (" ".join(arguments), done.returncode, done.stdout,
                                                   done.stderr))
        return done.stdout

    def evaluate(self, path, data, name):
        """Loss and logits in FP32."""
        file = os.path.join(self.work, name + ".logits.safetensors")
        out = json.loads(self.run("-o", "json", "eval", path, "--data", data, "--recipe", "fp32",
                                  "--sequence-length", str(LENGTH), "--batch", "2",
                                  "--sequences", str(SEQUENCES), "--logits", file))
        read = load_file(file)
        return out["loss"], read["tokens"].long(), read["logits"]


def transformers_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


def loss_of(logits, tokens, stream):
    """Mean −log softmax at the next token; the last of each sequence is read from the stream."""
    targets = torch.tensor([[stream[s * LENGTH + i + 1] for i in range(LENGTH)]
                            for s in range(tokens.shape[0])])
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()


def load(folder, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options)
    return model.eval()


def one_by_one(tensors):
    """The experts of stacked tensors under the names that released models have."""
    out = {}
    for name, value in tensors.items():
        found = re.match(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)(_scale_inv)?$",
                         name)
        if not found:
            out[name] = value
            continue
        layer, stack, scales = found.groups()
        for e in range(value.shape[0]):
            if stack == "down_proj":
                parts = {"down_proj": value[e]}
            else:
                parts = dict(zip(("gate_proj", "up_proj"), value[e].chunk(2, 0)))
            for part, rows in parts.items():
                out["%smlp.experts.%d.%s.weight%s" % (layer, e, part, scales or "")] = rows
    return out


def plain_name(name):
    """One name for both families, so that loaded parameters can be found."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        name = re.sub(r"(\.experts\.\d+\.)%s\." % old, r"\1%s." % new, name)
    return name


def differing(loaded, expected, same):
    """Tensors of `expected` (by plain name) that are missing in `loaded` or not the same."""
    return sorted(name for name, value in expected.items()
                  if name not in loaded or not same(loaded[name].cpu(), value))


def quantise(weight):
    """E4M3 codes and FP32 scales of 128×128 blocks: D = 1 / (448 / amax), codes nearest to x · 448/amax."""
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty((rows + 127) // 128, (cols + 127) // 128)
    for r in range(0, rows, 128):
        for c in range(0, cols, 128):
            block = weight[r:r + 128, c:c + 128]
            amax = block.abs().max()
            q = torch.tensor(448.0) / amax if amax > 0 else torch.tensor(1.0)
            codes[r:r + 128, c:c + 128] = (block * q).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales[r // 128, c // 128] = 1.0 / q
    return codes, scales


def dequantise(codes, scales):
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * wide[:codes.shape[0], :codes.shape[1]]


class Report:
    def __init__(self):
        self.failed = False

    def check(self, what, value, limit):
        good = value <= limit
        self.failed = self.failed or not good
        print("%-66s %12.3e  (limit %g)  %s" % (what, value, limit, "ok" if good else "FAILED"))


    def attempt(self, name, check):
        """One model's failure does not hide the others'."""
        try:
            check()
        except (Exception, SystemExit) as error:
            self.failed = True
            traceback.print_exc()
            print("%s: FAILED: %s" % (name, error))


def check_layouts(name, model, ours, octavo, data, work, report):
    """Other layouts of the same model."""
    if "save_original_format" in inspect.signature(model.save_pretrained).parameters:
        stacked = os.path.join(work, name + ".stacked")
        model.save_pretrained(stacked, save_original_format=False)
        assert any(k.endswith(".mlp.experts.gate_up_proj") for k in load_folder(stacked))
        octavo.run("import", stacked, stacked + ".start")
        _, _, again = octavo.evaluate(stacked + ".start", data, name + ".stacked")
        report.check(name + " stacked experts: logits that differ", int((again != ours).sum()), 0)
    else:
        print("%s: this transformers has no stacked layout" % name)
    half = os.path.join(work, name + ".f16")
    model.to(torch.float16).save_pretrained(half)
    model.to(torch.bfloat16)
    _, tokens, of_half = octavo.evaluate(half, data, name + ".f16")
    report.check(name + " f16: logits",
                 (of_half - transformers_logits(load(half), tokens)).abs().max().item(), LIMIT)


def check_family(name, config, octavo, work, report):
    torch.manual_seed(17)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    original = os.path.join(work, name)
    model.save_pretrained(original)
    weights = load_folder(original)
    stream = torch.randint(0, VOCAB, (LENGTH * SEQUENCES + 1,)).tolist()
    data = os.path.join(work, name + ".bin")
    write_llmc(data, stream)

    # Import.
    start = os.path.join(work, name + ".start")
    octavo.run("import", original, start)
    loss, tokens, ours = octavo.evaluate(start, data, name)
    reference = load(original)
    theirs = transformers_logits(reference, tokens)
    spread = theirs.std().item()
    assert spread > 0.05, "logits of standard deviation %g test nothing" % spread
    report.check(name + " import: logits", (ours - theirs).abs().max().item(), LIMIT)
    report.check(name + " import: loss", abs(loss - loss_of(theirs, tokens, stream)), 1e-5)

    report.attempt(name + " layouts",
                   lambda: check_layouts(name, model, ours, octavo, data, work, report))

    # Export.
    exported = os.path.join(work, name + ".bf16")
    octavo.run("export", start, exported, "--format", "bf16", "--context-length", "256")
    again = load_folder(exported)
    assert set(again) == {k for k in weights if not (k == "lm_head.weight" and
                                                     config.tie_word_embeddings)}, \
        set(again) ^ set(weights)
    different = sum(0 if torch.equal(again[k].view(torch.int16), weights[k].view(torch.int16)) else 1
                    for k in again)
    report.check(name + " export bf16: tensors that differ", different, 0)
    report.check(name + " export bf16: logits",
                 (ours - transformers_logits(load(exported), tokens)).abs().max().item(), LIMIT)

    # FP8.
    fp8 = os.path.join(work, name + ".fp8")
    octavo.run("export", start, fp8, "--format", "fp8")
    stored = load_folder(fp8)
    dequantised, wrong = {}, 0
    for key, value in stored.items():
        if key.endswith("_scale_inv"):
            continue
        if value.dtype != torch.float8_e4m3fn:
            dequantised[key] = value.float()
            continue
        scales = stored[key + "_scale_inv"]
        codes, expected = quantise(weights[key].float())
        wrong += int((codes.view(torch.uint8) != value.view(torch.uint8)).sum())
        wrong += int((scales != expected).sum())
        dequantised[key] = dequantise(value, scales)
    report.check(name + " fp8: codes and scales that differ", wrong, 0)
    quantised = json.load(open(os.path.join(fp8, "config.json")))["quantization_config"]
    assert quantised["quant_method"] == "fp8" and quantised["weight_block_size"] == [128, 128]
    plain = os.path.join(work, name + ".dequantised")
    os.makedirs(plain)
    from safetensors.torch import save_file
    save_file(dequantised, os.path.join(plain, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(exported, "config.json")) as file:
        text = json.load(file)
    text["torch_dtype"] = "float32"
    json.dump(text, open(os.path.join(plain, "config.json"), "w"))
    _, _, of_fp8 = octavo.evaluate(fp8, data, name + ".fp8")
    report.check(name + " fp8: logits",
                 (of_fp8 - transformers_logits(load(plain), tokens)).abs().max().item(), LIMIT)


def describe_differences(wrong, loaded, expected, codes):
    """What was loaded instead, for the first few: nothing, raw codes, other numbers."""
    for name in wrong[:3]:
        if name not in loaded:
            print("    %s: not loaded" % name)
            continue
        value = loaded[name].cpu()
        print("    %s: %s %s, raw codes: %s, largest distance %.3g" % (
            name, value.dtype, list(value.shape),
            torch.equal(value.float(), codes[name].float()),
            (value.float() - expected[name].float()).abs().max().item()))


def check_own_quantizer(name, config, octavo, work, report, cuda):
    torch.manual_seed(23)
    original = os.path.join(work, name)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(original)
    stream = torch.randint(0, VOCAB, (LENGTH * SEQUENCES + 1,)).tolist()
    data = os.path.join(work, name + ".bin")
    write_llmc(data, stream)
    octavo.run("import", original, original + ".start")
    fp8 = original + ".fp8"
    octavo.run("export", original + ".start", fp8, "--format", "fp8")
    stored = load_folder(fp8)
    codes = {plain_name(k): v for k, v in stored.items()}
    values = {k: dequantise(v, codes[k + "_scale_inv"]) if v.dtype == torch.float8_e4m3fn
              else v.float() for k, v in codes.items() if not k.endswith("_scale_inv")}
    loss, tokens, ours = octavo.evaluate(fp8, data, name + ".own")

    # Dequantised while loading: on a machine without a GPU it does so unasked.
    unpacked = original + ".unpacked"
    shutil.copytree(fp8, unpacked)
    with open(os.path.join(fp8, "config.json")) as file:
        text = json.load(file)
    text["quantization_config"]["dequantize"] = True
    with open(os.path.join(unpacked, "config.json"), "w") as file:
        json.dump(text, file)
    model = load(unpacked)
    loaded = one_by_one({plain_name(k): v for k, v in model.state_dict().items()})
    # Some versions and families give BF16, of all or of some tensors, whatever was asked for.
    wide = all(v.dtype == torch.float32 for v in loaded.values())
    wrong = differing(loaded, values, lambda a, b: torch.equal(a.float(), b.to(a.dtype).float()))
    report.check("%s own fp8, dequantised%s: tensors that differ" % (name, "" if wide else " (bf16 in part)"),
                 len(wrong), 0)
    describe_differences(wrong, loaded, values, codes)
    if wide:
        report.check(name + " own fp8, dequantised: logits",
                     (ours - transformers_logits(model, tokens)).abs().max().item(), LIMIT)
    if not cuda:
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(
        fp8, dtype=torch.bfloat16, device_map="cuda", attn_implementation="eager").eval()
    loaded = one_by_one({plain_name(k): v for k, v in model.state_dict().items()})
    wrong = differing(loaded, codes, lambda a, b: a.dtype == b.dtype and torch.equal(
        a.view(torch.uint8), b.view(torch.uint8)))
    report.check(name + " own fp8 on the GPU: tensors that differ", len(wrong), 0)
    describe_differences(wrong, loaded, codes, codes)
    try:
        theirs = transformers_logits(model, tokens.cuda()).cpu()
    except Exception as missing:  # its FP8 kernels come from the hub, which cannot be reached here
        print("%s own fp8 on the GPU: forward not run: %s" % (name, str(missing).split("\n")[0]))
        return
    # Activations are cast to FP8 too: 3 bits of mantissa give some per cent.
    report.check(name + " own fp8 on the GPU: relative distance of logits",
                 ((theirs - ours).norm() / ours.norm()).item(), 0.15)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", required=True, help="folder with octavo and octavo-rank")
    parser.add_argument("--cuda", action="store_true", help="load FP8 folders on a GPU too")
    arguments = parser.parse_args()
    torch.set_num_threads(4)
    print("torch %s, transformers %s" % (torch.__version__, transformers.__version__))
    report = Report()
    with tempfile.TemporaryDirectory() as work:
        octavo = Octavo(arguments.bin, work)
        for name, config in families():
            report.attempt(name, lambda: check_family(name, config, octavo, work, report))
        for name, config in blocked_families():
            report.attempt(name, lambda: check_own_quantizer(name, config, octavo, work, report,
                                                             arguments.cuda))
    print("FAILED" if report.failed else "all agree")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
