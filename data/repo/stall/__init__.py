"""The books of a market stall: money, dates, stock, orders and a report of them."""
