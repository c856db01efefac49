"""The command line: what a person types in a shell, and what is printed.

main       declares all commands; open this first
arguments  the options that several commands take, and how an error is said
info, loads (plan, verify), bench_stream, copies (copy, join), doctor   what each command does, and prints
findings   what doctor says of a job
"""
