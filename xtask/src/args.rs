//! Command lines: flags and `--name value` pairs, each taken once; what is left over is an error.

use crate::shell::{Failure, Outcome};

/// The words after a command's name.
pub(crate) struct Args {
    words: Vec<String>,
}

impl Args {
    pub(crate) fn new(words: Vec<String>) -> Self {
        Args { words }
    }

    /// Whether `--name` was given.
    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let before = self.words.len();
        self.words.retain(|word| word != name);
        self.words.len() != before
    }

    /// The value of `--name value` or `--name=value`.
    pub(crate) fn value(&mut self, name: &str) -> Result<Option<String>, Failure> {
        let prefix = format!("{name}=");
        let Some(at) = self.words.iter().position(|word| word == name || word.starts_with(&prefix)) else {
            return Ok(None);
        };
        let word = self.words.remove(at);
        if let Some(value) = word.strip_prefix(&prefix) {
            return Ok(Some(value.to_owned()));
        }
        if at == self.words.len() || self.words[at].starts_with("--") {
            return Err(Failure::Usage(format!("`{name}` needs a value")));
        }
        Ok(Some(self.words.remove(at)))
    }

    /// Hands on whatever no one took, to a program that knows it; nothing at all is refused.
    pub(crate) fn rest(self, help: &str) -> Result<Vec<String>, Failure> {
        if self.words.is_empty() { Err(Failure::Usage(help.to_owned())) } else { Ok(self.words) }
    }

    /// Whatever no one took.
    pub(crate) fn words(self) -> Vec<String> {
        self.words
    }

    /// Refuses whatever no one took.
    pub(crate) fn finish(self, help: &str) -> Outcome {
        match self.words.first() {
            None => Ok(()),
            Some(word) => Err(Failure::Usage(format!("unexpected `{word}`\n\n{help}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        Args::new(line.split_whitespace().map(str::to_owned).collect())
    }

    #[test]
    fn flags_and_values_are_taken_and_the_rest_is_refused() {
        let mut given = args("--offline --torch 2.6");
        assert!(given.flag("--offline"));
        assert!(!given.flag("--no-torch"));
        assert_eq!(given.value("--torch").unwrap().as_deref(), Some("2.6"));
        assert!(given.finish("").is_ok());

        assert_eq!(args("--torch=2.6").value("--torch").unwrap().as_deref(), Some("2.6"));
        assert!(args("--torch").value("--torch").is_err());
        assert!(args("--torch --offline").value("--torch").is_err());
        assert!(args("--ofline").finish("").is_err());
        assert_eq!(args("cpu --list").rest("").unwrap(), ["cpu", "--list"]);
        assert!(args("").rest("").is_err());
    }
}
