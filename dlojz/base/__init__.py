"""What every room speaks of: errors, sentences in two languages, files, fault injection, this machine."""
