"""Rewards, references and judges behind HTTP: forms of the messages, clients, endpoints."""
