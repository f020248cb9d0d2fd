//! What `cargo metadata` says of the workspace, reduced to what xtask asks of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::shell::{Failure, capture, cargo};

/// The platform whose dependencies are listed: that of the tested wheel, so that the answer is the same on any machine.
pub(crate) const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// The workspace's root: xtask lies one folder below it.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// How one package depends on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Normal,
    Dev,
    Build,
}

/// A package of the dependency graph.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    pub(crate) repository: Option<String>,
    pub(crate) folder: PathBuf,
    pub(crate) is_member: bool,
    /// Whether it may go to a registry.
    pub(crate) is_published: bool,
    pub(crate) is_proc_macro: bool,
    /// Dependencies as declared: the name of the package and how.
    pub(crate) declared: Vec<(String, Kind)>,
    /// Identifiers of the packages that normal dependencies resolve to.
    resolved: BTreeSet<String>,
}

/// The workspace and everything it depends on, by package identifier.
pub(crate) struct Workspace {
    packages: BTreeMap<String, Package>,
    pub(crate) target: PathBuf,
}

impl Workspace {
    pub(crate) fn load() -> Result<Self, Failure> {
        Self::load_with("")
    }

    /// With these features of members, comma-separated.
    pub(crate) fn load_with(features: &str) -> Result<Self, Failure> {
        let mut command = cargo(["metadata", "--format-version", "1", "--filter-platform", PLATFORM]);
        command.args(["--features", features]);
        let text = capture(command.current_dir(root()))?;
        Self::parse(&text).ok_or_else(|| Failure::Check("cargo metadata gave something that is not its format".into()))
    }

    fn parse(text: &str) -> Option<Self> {
        let json: Value = serde_json::from_str(text).ok()?;
        let members: BTreeSet<&str> = json["workspace_members"].as_array()?.iter().filter_map(Value::as_str).collect();
        let mut resolved: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for node in json["resolve"]["nodes"].as_array()? {
            let normal = node["deps"].as_array()?.iter().filter(|dep| {
                dep["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
            });
            let targets = normal.filter_map(|dep| dep["pkg"].as_str()).map(str::to_owned).collect();
            resolved.insert(node["id"].as_str()?, targets);
        }
        let mut packages = BTreeMap::new();
        for package in json["packages"].as_array()? {
            let id = package["id"].as_str()?;
            let declared = package["dependencies"].as_array()?.iter().filter_map(|dep| {
                let kind = match dep["kind"].as_str() {
                    Some("dev") => Kind::Dev,
                    Some("build") => Kind::Build,
                    _ => Kind::Normal,
                };
                Some((dep["name"].as_str()?.to_owned(), kind))
            });
            let kinds = package["targets"].as_array()?.iter().filter_map(|target| target["kind"].as_array()).flatten();
            packages.insert(
                id.to_owned(),
                Package {
                    name: package["name"].as_str()?.to_owned(),
                    version: package["version"].as_str()?.to_owned(),
                    license: package["license"].as_str().map(str::to_owned),
                    repository: package["repository"].as_str().map(str::to_owned),
                    folder: Path::new(package["manifest_path"].as_str()?).parent()?.to_owned(),
                    is_member: members.contains(id),
                    is_published: package["publish"].as_array().is_none_or(|registries| !registries.is_empty()),
                    is_proc_macro: kinds.into_iter().any(|kind| kind == "proc-macro"),
                    declared: declared.collect(),
                    resolved: resolved.remove(id).unwrap_or_default(),
                },
            );
        }
        Some(Workspace { packages, target: PathBuf::from(json["target_directory"].as_str()?) })
    }

    /// The packages that the workspace itself holds.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.values().filter(|package| package.is_member)
    }

    /// Foreign packages whose code is linked into `member`, by name: normal dependencies, without procedural macros and
    /// what only those need, because they run at compile time and leave no code behind.
    pub(crate) fn linked_into(&self, member: &str) -> Option<Vec<&Package>> {
        let (start, _) = self.packages.iter().find(|(_, package)| package.is_member && package.name == member)?;
        let mut seen = BTreeSet::from([start.as_str()]);
        let mut open = vec![start.as_str()];
        while let Some(id) = open.pop() {
            for next in self.packages.get(id).into_iter().flat_map(|package| &package.resolved) {
                if self.packages.get(next).is_some_and(|package| !package.is_proc_macro) && seen.insert(next) {
                    open.push(next);
                }
            }
        }
        let mut linked: Vec<&Package> =
            seen.iter().filter_map(|id| self.packages.get(*id)).filter(|package| !package.is_member).collect();
        linked.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        Some(linked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_crates_leave_out_members_and_procedural_macros() {
        let package = |name: &str, kind: &str, deps: &str| {
            format!(
                r#"{{"id":"{name}","name":"{name}","version":"1.0.0","license":"MIT","repository":null,
                "manifest_path":"/r/{name}/Cargo.toml","dependencies":[{deps}],"targets":[{{"kind":["{kind}"]}}]}}"#
            )
        };
        let node = |name: &str, deps: &[(&str, &str)]| {
            let deps: Vec<String> = deps
                .iter()
                .map(|(dep, kind)| format!(r#"{{"pkg":"{dep}","dep_kinds":[{{"kind":{kind}}}]}}"#))
                .collect();
            format!(r#"{{"id":"{name}","deps":[{}]}}"#, deps.join(","))
        };
        let text = format!(
            r#"{{"workspace_members":["binding"],"target_directory":"/t","packages":[{}],"resolve":{{"nodes":[{}]}}}}"#,
            [
                package("binding", "cdylib", r#"{"name":"half","kind":null},{"name":"proptest","kind":"dev"}"#),
                package("half", "lib", ""),
                package("derive", "proc-macro", ""),
                package("syn", "lib", ""),
                package("proptest", "lib", ""),
            ]
            .join(","),
            [
                node("binding", &[("half", "null"), ("derive", "null"), ("proptest", "\"dev\"")]),
                node("half", &[]),
                node("derive", &[("syn", "null")]),
                node("syn", &[]),
                node("proptest", &[]),
            ]
            .join(",")
        );
        let workspace = Workspace::parse(&text).unwrap();
        let names: Vec<&str> =
            workspace.linked_into("binding").unwrap().iter().map(|package| package.name.as_str()).collect();
        assert_eq!(names, ["half"]);
        let binding = workspace.members().next().unwrap();
        assert_eq!(binding.declared, [("half".to_owned(), Kind::Normal), ("proptest".to_owned(), Kind::Dev)]);
    }
}
