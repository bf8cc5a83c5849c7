"""From nothing but the target to a trained drafter and decider for SmolLM2-135M-Instruct, on two CPU cores.

The target writes conversations (about 75 minutes, 2.6 million answer tokens, 17 GB of hidden states), an EAGLE-3
drafter (about an hour) and then a decider learn from them, and a few prompts are decoded with the result. Interrupt it
whenever you like: the same command goes on where it stopped. `arbordraft train demo` does the same.

    python examples/train_smollm2.py
    python examples/train_smollm2.py --conversations 768 --folder quick    # a small one, in a quarter of an hour
"""

import argparse
from pathlib import Path

from rich.console import Console

from arbordraft.training.demo import Demo, gain


def main() -> None:
    """Runs the whole of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, default=Path("arbordraft-smollm2"), help="for data and results")
    options.add_argument("--conversations", type=int, help="how many to generate, 7296 by default")
    options.add_argument("--new-tokens", type=int, default=128, help="length of the answers that show the gain")
    options.add_argument("options", nargs="*", help="further options of `arbordraft train`, behind --")
    arguments = options.parse_args()

    console = Console()
    folders = Demo(arguments.folder, arguments.conversations, options=arguments.options).run(console)
    console.rule("what it gains")
    gain(console, folders["drafter"], arguments.new_tokens)


if __name__ == "__main__":
    main()
