"""Text in, text out: the code of the README."""

import arbordraft as ad

decoder = ad.load("smollm2")  # hub name, folder, GGUF file, or a model in memory
print(decoder.complete("What is the capital of France?", max_new_tokens=32))

for piece in decoder.complete("Tell me a story.", temperature=0.8, seed=2, max_new_tokens=24, stream=True):
    print(piece, end="", flush=True)

messages = [{"role": "user", "content": "Why is the sky blue?"}]
print("", decoder.chat(messages, max_new_tokens=32), sep="\n")
