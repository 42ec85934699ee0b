"""Reporting: tables, figures and the page, made from records alone."""
