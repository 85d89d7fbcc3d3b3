#!/usr/bin/env python3
"""A Hugging Face folder that Octavo wrote, read and run by code that shares nothing with Octavo.

usage: check_folder.py --bin build/bin

A stand-in for transformers where it is not installed (check_transformers.py is the real thing): the
two families' forward pass written out from their definition, on tensors taken from the folder by
their Hugging Face names. A random folder of each family is imported, evaluated and exported again.
Compared: FP32 logits within 1e-4; BF16 weights bit for bit; FP8 codes and scales with a quantiser of
its own. Exit 77: this Python has no torch.
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
except ImportError:
    print("skipped: this Python has no torch; Debian's package is python3-torch")
    sys.exit(77)

LIMIT = 1e-4
VOCAB, LENGTH, SEQUENCES = 320, 48, 4
TYPES = {"F32": (torch.float32, 4), "BF16": (torch.bfloat16, 2), "F8_E4M3": (torch.uint8, 1),
         "I32": (torch.int32, 4)}


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, width = TYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + size + begin:8 + size + end])
        tensors[name] = torch.frombuffer(raw, dtype=dtype).reshape(entry["shape"])
        assert tensors[name].numel() * width == end - begin
    return tensors


def read_folder(folder):
    with open(os.path.join(folder, "model.safetensors.index.json")) as file:
        index = json.load(file)["weight_map"]
    files = {name: read_safetensors(os.path.join(folder, name)) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def write_folder(folder, config, weights):
    """One BF16 file; the header is written by hand too."""
    os.makedirs(folder)
    header, body = {}, b""
    for name, value in weights.items():
        raw = value.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape),
                        "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


CODES = torch.tensor([(-1.0 if c & 128 else 1.0) *
                      ((c & 7) * 2.0**-9 if c & 120 == 0 else
                       (8 + (c & 7)) * 2.0**((c >> 3 & 15) - 10)) for c in range(256)])
CODES[127] = CODES[255] = float("nan")


def dequantise(codes, scales):
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return CODES[codes.long()] * wide[:codes.shape[0], :codes.shape[1]]


def quantise(weight):
    """Codes nearest to x · 448/amax of the block (even on ties), and 1 / (448/amax)."""
    positive = CODES[:127]
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    scales = torch.zeros((weight.shape[0] + 127) // 128, (weight.shape[1] + 127) // 128)
    for r in range(0, weight.shape[0], 128):
        for c in range(0, weight.shape[1], 128):
            block = weight[r:r + 128, c:c + 128]
            amax = block.abs().max()
            q = torch.tensor(448.0) / amax if amax > 0 else torch.tensor(1.0)
            x = block * q
            above = torch.searchsorted(positive, x.abs().clamp(max=448.0))
            below = (above - 1).clamp(min=0)
            up, down = positive[above] - x.abs().clamp(max=448.0), x.abs() - positive[below]
            nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
            sign = torch.signbit(x).to(torch.uint8) * 128
            codes[r:r + 128, c:c + 128] = nearest.to(torch.uint8) + sign
            scales[r // 128, c // 128] = 1.0 / q
    return codes, scales


def forward(config, w, tokens):
    """Logits [n, S, V] in FP64."""
    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight

    def swiglu(x, gate, up, down):
        g = x @ w[gate].T
        return (g * torch.sigmoid(g) * (x @ w[up].T)) @ w[down].T

    mixtral = config["model_type"] == "mixtral"
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n, length = tokens.shape
    angle = (torch.arange(length).double()[:, None] *
             config["rope_theta"]**(-torch.arange(0, dim, 2).double() / dim))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

    def rotate(x):  # [n, heads, S, D]; the halves of a head turn together
        half = torch.cat([-x[..., dim // 2:], x[..., :dim // 2]], -1)
        return x * cos + half * sin

    mask = torch.full((length, length), float("-inf")).double().triu(1)
    x = w["model.embed_tokens.weight"][tokens]
    for l in range(config["num_hidden_layers"]):
        p = "model.layers.%d." % l
        h = norm(x, w[p + "input_layernorm.weight"])
        a = p + "self_attn."
        q = (h @ w[a + "q_proj.weight"].T).view(n, length, heads, dim)
        k = (h @ w[a + "k_proj.weight"].T).view(n, length, kv, dim)
        v = (h @ w[a + "v_proj.weight"].T).view(n, length, kv, dim)
        if not mixtral:
            q, k = norm(q, w[a + "q_norm.weight"]), norm(k, w[a + "k_norm.weight"])
        q, k = rotate(q.transpose(1, 2)), rotate(k.transpose(1, 2))
        k = k.repeat_interleave(heads // kv, 1)
        v = v.transpose(1, 2).repeat_interleave(heads // kv, 1)
        scores = q @ k.transpose(2, 3) / dim**0.5 + mask
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, -1) @ w[
            a + "o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        if l in config.get("mlp_only_layers", []):
            x = x + swiglu(h, *(p + "mlp.%s_proj.weight" % part for part in ("gate", "up", "down")))
            continue
        moe = p + ("block_sparse_moe." if mixtral else "mlp.")
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        score = (h @ w[moe + "gate.weight"].T).softmax(-1)
        chosen, index = score.topk(config["num_experts_per_tok"], -1)
        if mixtral or config["norm_topk_prob"]:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weight = torch.zeros_like(score).scatter(-1, index, chosen)
        for e in range(score.shape[-1]):
            names = ["%sexperts.%d.%s.weight" % (moe, e, part) for part in parts]
            x = x + weight[..., e:e + 1] * swiglu(h, *names)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, w["model.norm.weight"]) @ w[head].T


def make_weights(config):
    mixtral = config["model_type"] == "mixtral"
    hidden, dim = config["hidden_size"], config["head_dim"]
    wide = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    weights = {}

    def add(name, *shape):
        value = torch.randn(*shape) * 0.08 if len(shape) > 1 else 1 + 0.3 * torch.randn(*shape)
        weights[name + ".weight"] = value.to(torch.bfloat16)

    add("model.embed_tokens", VOCAB, hidden)
    for l in range(config["num_hidden_layers"]):
        p = "model.layers.%d." % l
        add(p + "input_layernorm", hidden)
        add(p + "post_attention_layernorm", hidden)
        for name, rows in zip("qkv", (wide[0], wide[1], wide[1])):
            add(p + "self_attn.%s_proj" % name, rows, hidden)
        add(p + "self_attn.o_proj", hidden, wide[0])
        if not mixtral:
            add(p + "self_attn.q_norm", dim)
            add(p + "self_attn.k_norm", dim)
        if l in config.get("mlp_only_layers", []):
            ffn = config["intermediate_size"]
            add(p + "mlp.gate_proj", ffn, hidden)
            add(p + "mlp.up_proj", ffn, hidden)
            add(p + "mlp.down_proj", hidden, ffn)
            continue
        moe = p + ("block_sparse_moe." if mixtral else "mlp.")
        ffn = config["intermediate_size" if mixtral else "moe_intermediate_size"]
        experts = config["num_local_experts" if mixtral else "num_experts"]
        add(moe + "gate", experts, hidden)
        for e in range(experts):
            for part in (("w1", "w3") if mixtral else ("gate_proj", "up_proj")):
                add("%sexperts.%d.%s" % (moe, e, part), ffn, hidden)
            add("%sexperts.%d.%s" % (moe, e, "w2" if mixtral else "down_proj"), hidden, ffn)
    add("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        add("lm_head", VOCAB, hidden)
    return weights


def configs():
    common = dict(vocab_size=VOCAB, hidden_size=96, num_hidden_layers=3, num_attention_heads=6,
                  num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, rope_theta=5e4)
    yield dict(model_type="mixtral", num_local_experts=6, intermediate_size=160, rms_norm_eps=2e-5,
               tie_word_embeddings=False, **common)
    yield dict(model_type="qwen3_moe", num_experts=6, moe_intermediate_size=160,
               intermediate_size=192, mlp_only_layers=[1], norm_topk_prob=True, rms_norm_eps=1e-6,
               tie_word_embeddings=False, **common)
    yield dict(model_type="qwen3_moe", num_experts=6, moe_intermediate_size=160,
               norm_topk_prob=False, rms_norm_eps=1e-6, tie_word_embeddings=True, **common)


class Octavo:
    def __init__(self, bin_dir, work):
        self.program, self.work, self.count = os.path.join(bin_dir, "octavo"), work, 0

    def run(self, *arguments):
        done = subprocess.run([self.program, *arguments], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True, timeout=600)
        if done.returncode != 0:
            sys.exit("octavo %s: exit %d\n%s%s" %
                     (" ".join(arguments), done.returncode, done.stdout, done.stderr))
        return done.stdout

    def evaluate(self, path, data):
        self.count += 1
        file = os.path.join(self.work, "logits%d" % self.count)
        out = json.loads(self.run("-o", "json", "eval", path, "--data", data, "--recipe", "fp32",
                                  "--sequence-length", str(LENGTH), "--batch", "2",
                                  "--sequences", str(SEQUENCES), "--logits", file))
        read = read_safetensors(file)
        return out["loss"], read["tokens"].long(), read["logits"].double()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", required=True, help="folder with octavo and octavo-rank")
    bin_dir = parser.parse_args().bin
    torch.manual_seed(17)
    failed = False

    def check(what, value, limit):
        nonlocal failed
        failed = failed or not value <= limit
        print("%-44s %12.3e  (limit %g)  %s" % (what, value, limit,
                                                "ok" if value <= limit else "FAILED"))

    with tempfile.TemporaryDirectory() as work:
        octavo = Octavo(bin_dir, work)
        stream = torch.randint(0, VOCAB, (LENGTH * SEQUENCES + 1,)).tolist()
        data = os.path.join(work, "tokens.bin")
        with open(data, "wb") as file:  # llm.c's format
            file.write(struct.pack("<256i", 20240520, 1, len(stream), *([0] * 253)))
            file.write(struct.pack("<%dH" % len(stream), *stream))
        for number, config in enumerate(configs()):
            at = lambda name: os.path.join(work, "%d.%s" % (number, name))
            what = "%s (%d) " % (config["model_type"], number)
            weights = make_weights(config)
            write_folder(at("hf"), config, weights)
            octavo.run("import", at("hf"), at("start"))
            loss, tokens, ours = octavo.evaluate(at("start"), data)
            exact = {name: value.double() for name, value in weights.items()}
            theirs = forward(config, exact, tokens)
            check(what + "import: logits", (ours - theirs).abs().max().item(), LIMIT)
            targets = torch.tensor(stream[1:]).view(SEQUENCES, LENGTH)
            expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), targets.flatten())
            check(what + "import: loss", abs(loss - expected.item()), 1e-5)
            # A test that rotates nothing or routes everything alike would agree with anything.
            assert theirs.std() > 0.1, theirs.std()

            octavo.run("export", at("start"), at("bf16"), "--format", "bf16", "--shard-bytes",
                       "100000")
            again = read_folder(at("bf16"))
            assert set(again) == set(weights), set(again) ^ set(weights)
            check(what + "export bf16: tensors that differ",
                  sum(not torch.equal(again[k].view(torch.int16), weights[k].view(torch.int16))
                      for k in again), 0)

            octavo.run("export", at("start"), at("fp8"), "--format", "fp8")
            stored, wrong, values = read_folder(at("fp8")), 0, {}
            for key, value in stored.items():
                if key.endswith("_scale_inv"):
                    continue
                if value.dtype == torch.uint8:
                    codes, scales = quantise(weights[key].float())
                    wrong += int((codes != value).sum()) + int((scales != stored[key + "_scale_inv"]).sum())
                    value = dequantise(value, stored[key + "_scale_inv"])
                values[key] = value.double()
            check(what + "export fp8: codes and scales that differ", wrong, 0)
            _, _, of_fp8 = octavo.evaluate(at("fp8"), data)
            check(what + "export fp8: logits",
                  (of_fp8 - forward(config, values, tokens)).abs().max().item(), LIMIT)
    print("FAILED" if failed else "all agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
