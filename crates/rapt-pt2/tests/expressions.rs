//! Expressions against sympy's values of them, and against their own text.
#![allow(missing_docs)]

use proptest::prelude::*;
use rapt_pt2::{
    Condition, Expr, ExprError, ParseError, Real, Relation, Rounding, Symbols, parse_condition, parse_expr,
};

fn symbols(values: &[(&str, i64)]) -> Symbols {
    values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

/// `expect` is the expression's text and its value, or the error.
fn check(text: &str, expect: &str) {
    let symbols = symbols(&[("s0", 7), ("s1", 3), ("u0", -5)]);
    let got = match parse_expr(text) {
        Ok(expr) => match expr.eval(&symbols) {
            Ok(value) => format!("{expr} = {value}"),
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    assert_eq!(got, expect, "{text}");
}

#[test]
fn expressions_have_the_values_that_sympy_gives_them() {
    let table = include_str!("fixtures/expressions.tsv");
    for line in table.lines() {
        let cells: Vec<&str> = line.split('\t').collect();
        let [text, s0, s1, u0, value] = cells[..] else { panic!("{line}") };
        let number = |text: &str| text.parse::<i64>().expect("a number");
        let symbols = symbols(&[("s0", number(s0)), ("s1", number(s1)), ("u0", number(u0))]);
        let expr = parse_expr(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(expr.eval(&symbols), Ok(number(value)), "{text} at {symbols:?}");
        // The text of an expression means the same.
        let again = parse_expr(&expr.to_string()).unwrap_or_else(|error| panic!("{expr}: {error}"));
        assert_eq!(again.eval(&symbols), Ok(number(value)), "{expr} at {symbols:?}");
    }
    assert_eq!(table.lines().count(), 150);
}

#[test]
fn both_forms_of_sympy_text_are_read() {
    check("Mul(Integer(4), Symbol('s1', positive=True, integer=True))", "4*s1 = 12");
    check("Add(Integer(-1), Mul(Integer(2), Symbol('s0')))", "-1 + 2*s0 = 13");
    check("2*s0 - 1", "2*s0 + -1 = 13");
    check("s0*(s1 + 1)", "s0*(s1 + 1) = 28");
    check("(s0//2)", "s0 // 2 = 3");
    check("s0 // 2 // 2", "(s0 // 2) // 2 = 1");
    check("-u0 // 2", "(-1*u0) // 2 = 2");
    check("-(u0 // 2)", "-1*(u0 // 2) = 3");
    check("Mod(u0, s1) + PythonMod(u0, 8)", "u0 % s1 + u0 % 8 = 4");
    check("Max(1, s0) * Min(s1, s0, 2)", "max(1, s0)*min(s1, s0, 2) = 14");
    check("2**s1", "2**s1 = 8");
    check("-2**2", "-1*2**2 = -4");
    check("CeilDiv(s0, 2) + CleanDiv(6, s1)", "-1*((-1*s0) // 2) + 6 // s1 = 6");
    check("TruncToInt(IntTrueDiv(u0, 2))", "math.trunc(torch.sym_float(u0) / torch.sym_float(2)) = -2");
    check("abs(u0) + LShift(s1, 2) + RShift(s0, 1)", "abs(u0) + s1*2**2 + s0 // 2**1 = 20");
    check("Where(StrictLessThan(s0, s1), 1, Identity(2))", "Where(s0 < s1, 1, 2) = 2");
}

#[test]
fn a_tensor_is_dense_where_its_strides_are_products_of_sizes() {
    let dense = |parts: &str| format!("IsNonOverlappingAndDenseIndicator({parts})");
    for (parts, value) in [
        ("2, 3, 3, 1", 1),
        ("2, 3, 1, 2", 1),
        ("2, 3, 4, 1", 0),
        ("1, 3, 99, 1", 1),
        ("2, 2, 0, 1", 0),
        ("5, 1", 1),
        ("5, 2", 0),
        ("1, 2", 1),
    ] {
        let expr = parse_expr(&dense(parts)).expect(parts);
        assert_eq!(expr.eval(&Symbols::new()), Ok(value), "{parts}");
    }
}

#[test]
fn arithmetic_beyond_64_bits_is_an_error() {
    check("s0 + 9223372036854775807", "the value of s0 + 9223372036854775807 does not fit 64 bits");
    check("4294967296*4294967296", "the value of 4294967296*4294967296 does not fit 64 bits");
    check("2**63", "the value of 2**63 does not fit 64 bits");
    check("2**u0", "the value of 2**u0 does not fit 64 bits");
    check("s0 // (s1 - 3)", "s0 // (s1 + -3) divides by zero");
    check("s0 % 0", "s0 % 0 divides by zero");
    check("(-9223372036854775807 - 1) // -1", "the value of (-9223372036854775807 + -1) // -1 does not fit 64 bits");
    check(
        "math.floor(1e300 * torch.sym_float(s0))",
        "the value of math.floor(1e300*torch.sym_float(s0)) does not fit 64 bits",
    );
    check(
        "math.floor(1.0 / (torch.sym_float(s1) - 3))",
        "1.0 / (torch.sym_float(s1) + -1.0*torch.sym_float(3)) divides by zero",
    );
    check("s9", "symbol s9 has no value");
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    check("sin(s0)", "sin(…) of 1 arguments is not served as an integer");
    check("OpaqueUnaryFn_sqrt(s0)", "OpaqueUnaryFn_sqrt(…) of 1 arguments is not served as an integer");
    check("Pow(s0)", "Pow(…) of 1 arguments is not served as an integer");
    check("s0 / 2", "… / … is not served as an integer");
    check("s0 < 2", "… < … is not served as an integer");
    check("oo", "oo is not served as an integer");
    check("1.5", "1.5 is not served as an integer");
    check("s0.size", "s0.size is not served as an integer");
    check("__import__('os').system('x')", "….system(…) of 1 arguments is not served as an integer");
    check("Symbol('31')", "Symbol(…) of 1 arguments is not served as an integer");
    check("Symbol('s0 + 1')", "Symbol(…) of 1 arguments is not served as an integer");
    check("math.floor(1e999)", "1e999 does not fit 64 bits");
    check("math.floor(Float('inf'))", "inf does not fit 64 bits");
    check("9223372036854775808", "9223372036854775808 does not fit 64 bits");
    check("", "byte 0 of \"\" is not understood");
    check("s0 +", "byte 4 of \"s0 +\" is not understood");
    check("s0 s1", "byte 5 of \"s0 s1\" is not understood");
    check("(s0", "byte 3 of \"(s0\" is not understood");
    check("s0 < s1 < 3", "byte 9 of \"s0 < s1 < 3\" is not understood");
    check("s0 ∧ s1", "byte 3 of \"s0 ∧ s1\" is not understood");
    check("Symbol('s\\0')", "byte 7 of \"Symbol('s\\\\0')\" is not understood");
}

#[test]
fn conditions_follow_python() {
    let symbols = symbols(&[("s0", 7), ("s1", 3)]);
    for (text, holds) in [
        ("s0 % 2 == 1 and not s1 > 3", true),
        ("s0 == 1 or s1 == 3 and s0 == 7", true),
        ("not (s0 == 7)", false),
        ("And(Ne(s0, s1), GreaterThan(s0, s1))", true),
        ("Or(Eq(s0, s1), LessThan(s0, s1))", false),
        ("Not(Equality(Mod(s0, 2), Integer(1)))", false),
        ("true", true),
        // What stands behind a decided `or` is not evaluated.
        ("s0 == 7 or s9 == 1", true),
        ("s0 / s1 > 2.3", true),
        ("s0 < math.inf", true),
        ("1.5*torch.sym_float(s1) == 4.5", true),
    ] {
        let condition = parse_condition(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(condition.eval(&symbols), Ok(holds), "{text}");
        let again = parse_condition(&condition.to_string()).unwrap_or_else(|error| panic!("{condition}: {error}"));
        assert_eq!(again.eval(&symbols), Ok(holds), "{condition}");
    }
    let unbound = parse_condition("s0 == 8 or s9 == 1").expect("a condition");
    assert_eq!(unbound.eval(&symbols), Err(ExprError::Unbound("s9".to_owned())));
}

#[test]
fn depth_and_length_are_bounded() {
    let deep = |open: &str, count: usize, close: &str| format!("{}s0{}", open.repeat(count), close.repeat(count));
    for text in [
        deep("(", 100_000, ")"),
        deep("-", 60_000, ""),
        deep("Abs(", 10_000, ")"),
        deep("not ", 10_000, ""),
        format!("s0{}", "[0]".repeat(10_000)),
        format!("s0{}", ".a".repeat(10_000)),
        format!("2{}", "**2".repeat(10_000)),
        format!("s0{}", "//2".repeat(10_000)),
    ] {
        let error = parse_expr(&text).expect_err("too deep");
        assert!(matches!(error, ParseError::TooDeep { .. } | ParseError::TooLong { .. }), "{error}");
        assert!(error.to_string().len() < 600, "{}", error.to_string().len());
    }
    // A long sum is not deep.
    let sum = format!("s0{}", "+s0".repeat(10_000));
    assert_eq!(parse_expr(&sum).expect("a sum").eval(&symbols(&[("s0", 2)])), Ok(20_002));
    // What is as deep as is read can be evaluated, written and dropped on a small stack.
    let highest = format!("{}s0{}", "Max(1, ".repeat(60), ")".repeat(60)) + &"//1".repeat(190);
    let run = move || {
        let expr = parse_expr(&highest).expect("not too deep");
        assert_eq!(expr.eval(&symbols(&[("s0", 5)])), Ok(5));
        assert!(expr.to_string().len() > 400);
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(run).expect("a thread").join().expect("no overflow");
}

fn any_expr() -> impl Strategy<Value = Expr> {
    let leaf = prop_oneof![
        any::<i8>().prop_map(|n| Expr::Int(n.into())),
        prop_oneof![Just("s0"), Just("s1"), Just("u0")].prop_map(|name| Expr::Symbol(name.to_owned())),
    ];
    leaf.prop_recursive(4, 40, 3, |inner| {
        let two = (inner.clone(), inner.clone()).prop_map(|(a, b)| (Box::new(a), Box::new(b)));
        let many = prop::collection::vec(inner.clone(), 2..4);
        prop_oneof![
            many.clone().prop_map(Expr::Add),
            many.clone().prop_map(Expr::Mul),
            many.clone().prop_map(Expr::Min),
            many.prop_map(Expr::Max),
            two.clone().prop_map(|(a, b)| Expr::FloorDiv(a, b)),
            two.clone().prop_map(|(a, b)| Expr::Mod(a, b)),
            two.clone().prop_map(|(a, b)| Expr::Pow(a, b)),
            inner.clone().prop_map(|a| Expr::Abs(Box::new(a))),
            two.clone().prop_map(|(a, b)| {
                let real = Real::Div(Box::new(Real::Int(*a)), Box::new(Real::Int(*b)));
                Expr::Round(Rounding::Floor, Box::new(real))
            }),
            (two, inner).prop_map(|((a, b), c)| {
                Expr::Where(Box::new(Condition::Int(Relation::Less, *a, *b)), Box::new(c.clone()), Box::new(c))
            }),
        ]
    })
}

proptest! {
    #[test]
    fn an_expression_means_what_its_text_means(expr in any_expr(), s0 in 1i64..99, s1 in 1i64..99, u0 in -99i64..99) {
        let symbols = symbols(&[("s0", s0), ("s1", s1), ("u0", u0)]);
        let text = expr.to_string();
        let again = parse_expr(&text).map_err(|error| TestCaseError::fail(format!("{text}: {error}")))?;
        match (expr.eval(&symbols), again.eval(&symbols)) {
            (Ok(a), Ok(b)) => prop_assert_eq!(a, b, "{}", text),
            (Err(a), Err(b)) => prop_assert_eq!(std::mem::discriminant(&a), std::mem::discriminant(&b), "{}", text),
            (a, b) => prop_assert!(false, "{}: {:?}, {:?}", text, a, b),
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[-+*/%()<>=!.,'\\[\\] a-zL0-9]{0,60}") {
        if let Ok(expr) = parse_expr(&text) {
            let _ = expr.eval(&symbols(&[("s0", 3)]));
        }
        if let Ok(condition) = parse_condition(&text) {
            let _ = condition.eval(&Symbols::new());
        }
    }
}
