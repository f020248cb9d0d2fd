//! Where what was compiled on this machine is kept between processes: one rule for every backend.

use std::ffi::OsString;
use std::path::PathBuf;

/// `RAPT_CACHE_DIR`, else `XDG_CACHE_HOME/rapt`, else `~/.cache/rapt`, on Windows `LOCALAPPDATA/rapt/cache`; `None` where the first is empty, or none of
/// them is set. The folder may not be there.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    folder_of(cfg!(windows), |name| std::env::var_os(name))
}

fn folder_of(is_windows: bool, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let of = |name: &str| variable(name).map(PathBuf::from);
    let folder = match of("RAPT_CACHE_DIR") {
        Some(folder) => Some(folder),
        None if is_windows => of("LOCALAPPDATA").map(|folder| folder.join("rapt").join("cache")),
        None => of("XDG_CACHE_HOME")
            .filter(|folder| folder.is_absolute())
            .or_else(|| of("HOME").map(|home| home.join(".cache")))
            .map(|folder| folder.join("rapt")),
    };
    folder.filter(|folder| !folder.as_os_str().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_is_set_names_the_folder() {
        let check_on = |is_windows: bool, variables: &[(&str, &str)], expected: Option<&str>| {
            let of = |name: &str| variables.iter().find(|(is, _)| *is == name).map(|(_, value)| OsString::from(value));
            assert_eq!(folder_of(is_windows, of), expected.map(PathBuf::from), "{variables:?}");
        };
        let check = |variables: &[(&str, &str)], expected| check_on(false, variables, expected);
        check(&[], None);
        check(&[("HOME", "/h/a")], Some("/h/a/.cache/rapt"));
        // What begins at no root is none where the test runs.
        if cfg!(unix) {
            check(&[("HOME", "/h/a"), ("XDG_CACHE_HOME", "/x")], Some("/x/rapt"));
        }
        // The standard ignores a relative one.
        check(&[("HOME", "/h/a"), ("XDG_CACHE_HOME", "x")], Some("/h/a/.cache/rapt"));
        check(&[("HOME", "/h/a"), ("RAPT_CACHE_DIR", "here")], Some("here"));
        check(&[("HOME", "/h/a"), ("RAPT_CACHE_DIR", "")], None);
        check_on(true, &[("HOME", "/h/a")], None);
        check_on(true, &[("HOME", "/h/a"), ("LOCALAPPDATA", "/l")], Some("/l/rapt/cache"));
        check_on(true, &[("LOCALAPPDATA", "/l"), ("RAPT_CACHE_DIR", "here")], Some("here"));
        check_on(true, &[("LOCALAPPDATA", "/l"), ("RAPT_CACHE_DIR", "")], None);
    }
}
