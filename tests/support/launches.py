"""Numbers of launches of operators that verify; tests in Triton's interpreter count them."""

LAUNCHES = {
    "score_rows": 3,
    "score_rows, undivided": 2,
    "log_sum_exp": 2,
    "take_tops": 1,
    "rejection_ends": 1,
    "draw_behind": 2,
    "gumbel_argmax": 2,
    "matching_ends": 1,
}


def launches(operators):
    """Returns how many launches these operators take, by name; torch's own take one."""
    return sum(count * LAUNCHES.get(name, 1) for name, count in operators.items())
