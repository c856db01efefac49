"""The command line: what a person types in a shell, and what is printed.

main       declares all commands and their options; open this first. It has `info` and `plan`
arguments  parses the options that several commands take
verify     ``shardload verify``
copy       ``shardload copy``
demo       ``shardload demo``
doctor     ``shardload doctor``
"""
