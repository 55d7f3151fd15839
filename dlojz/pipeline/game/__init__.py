"""Ten levels of schedules to build by hand: positions and their rules, a coach, and the ranks that execute them."""
