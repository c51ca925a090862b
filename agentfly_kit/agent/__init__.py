"""Agents, their chains and rollouts, and the budgets that chains share."""
