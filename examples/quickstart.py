"""Assemble a decoder and answer two prompts at once."""

import arbordraft as ad
from arbordraft.pretrained import load_smollm2
from arbordraft.prompts import chat_batch

model, tokenizer = load_smollm2()  # or any causal LM of transformers with its tokenizer
decoder = ad.SpeculativeDecoder(
    target=ad.RaggedModel(model, tokenizer),
    drafter=ad.NGramDrafter(),
    topology=ad.TreeTopology.from_k_config((2, 1, 1, 1)),
    coupling=ad.Coupling.matching(2),
)
inputs = chat_batch(tokenizer, ["What is the capital of France?", "Write 'One two three.' six times."])
output = decoder.generate(**inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
print(*tokenizer.batch_decode(output.sequences, skip_special_tokens=True), sep="\n")
print(f"{output.stats.tau:.2f} tokens per forward, {output.stats.pad_rows} padded rows, {output.stats.exactness}")
