// Rules for mistakes, without rules for style. `tsc` already finds names that are not defined or not used.

import js from "@eslint/js";

export default [
  { ignores: ["**/vendor/"] },
  {
    files: ["mie/page/web/*.js", "tests/web/*.js"],
    rules: {
      ...js.configs.recommended.rules,
      "no-undef": "off",
      "no-unused-vars": ["error", { ignoreRestSiblings: true }],
      "array-callback-return": "error",
      eqeqeq: "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-eval": "error",
      "no-promise-executor-return": "error",
      "no-restricted-properties": ["error", ...["innerHTML", "outerHTML", "insertAdjacentHTML"].map((property) => ({ property, message: "Build elements with el()." }))],
      "no-self-compare": "error",
      "no-shadow": "error",
      "no-template-curly-in-string": "error",
      "no-unreachable-loop": "error",
      "no-var": "error",
      "prefer-const": "error",
    },
  },
];
