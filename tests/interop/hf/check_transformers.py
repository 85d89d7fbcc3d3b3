#!/usr/bin/env python3
"""Octavo's Hugging Face folders against transformers itself, both ways, Mixtral and Qwen3-MoE.

    tests/interop/hf/check_transformers.py --bin build/bin

For each family a small model is initialised by transformers at random, rounded to BF16 and saved.
  import   octavo import → octavo eval (fp32): logits and loss equal transformers' in FP32
  export   octavo export --format bf16: transformers loads it; every weight is bit-equal to the
           original, the logits equal Octavo's
  fp8      octavo export --format fp8: codes and scales, read by this script alone, are those of an
           independent quantiser; dequantised and run by transformers they give the logits that
           `octavo eval` computes from the FP8 folder
Logits must agree within 1e-4 (FP32 on both sides, logits of order 1; the sums differ in order).
Needs torch, transformers and safetensors (exit 77 without them), runs on the CPU, downloads nothing.
"""
import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile

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
                  max_position_embeddings=256, initializer_range=0.08, attn_implementation="eager")
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


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


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
        print("%-58s %12.3e  (limit %g)  %s" % (what, value, limit, "ok" if good else "FAILED"))


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", required=True, help="folder with octavo and octavo-rank")
    arguments = parser.parse_args()
    torch.set_num_threads(4)
    print("torch %s, transformers %s" % (torch.__version__, transformers.__version__))
    report = Report()
    with tempfile.TemporaryDirectory() as work:
        for name, config in families():
            check_family(name, config, Octavo(arguments.bin, work), work, report)
    print("FAILED" if report.failed else "all agree")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
