"""A user's module, which registers a loss and an advantage. Ranks import it by the path of its functions."""

from workers import register_advantage, register_policy_loss


@register_policy_loss("own_reinforce")
def reinforce(tokens, args):
    """REINFORCE."""
    return -tokens.advantages * tokens.log_probs, {"own_metric": tokens.mask * args.user.scale}


@register_advantage("own_advantage")
def above_mean(rows, args):
    """Rewards minus the mean of those of all ranks."""
    return args.user.scale * (rows["rewards"] - rows.everywhere("rewards").mean())


def less_values(rows, args):
    """Rewards minus the values of a connected critic."""
    return rows["rewards"][:, None] - rows["values"]


def unregistered(tokens, args):
    """A loss of the wrong shape."""
    return tokens.log_probs[:, 1:], {}
