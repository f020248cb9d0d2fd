//! Expressions as people write them, for errors.

use rapt_pt2::Expr;

/// Such as `2*s0 + 1`.
pub(crate) fn of_expr(expr: &Expr) -> String {
    let join = |terms: &[Expr], by: &str| terms.iter().map(of_factor).collect::<Vec<_>>().join(by);
    let call = |name: &str, terms: &[Expr]| {
        let terms: Vec<String> = terms.iter().map(of_expr).collect();
        format!("{name}({})", terms.join(", "))
    };
    match expr {
        Expr::Int(n) => n.to_string(),
        Expr::Symbol(name) => name.clone(),
        Expr::Add(terms) => terms.iter().map(of_expr).collect::<Vec<_>>().join(" + "),
        Expr::Mul(terms) => join(terms, "*"),
        Expr::Pow(a, b) => format!("{}**{}", of_factor(a), of_factor(b)),
        Expr::Min(terms) => call("Min", terms),
        Expr::Max(terms) => call("Max", terms),
        Expr::FloorDiv(a, b) => format!("{}//{}", of_factor(a), of_factor(b)),
        Expr::Mod(a, b) => format!("{} % {}", of_factor(a), of_factor(b)),
    }
}

fn of_factor(expr: &Expr) -> String {
    match expr {
        Expr::Add(_) | Expr::Mul(_) | Expr::FloorDiv(..) | Expr::Mod(..) => format!("({})", of_expr(expr)),
        _ => of_expr(expr),
    }
}
